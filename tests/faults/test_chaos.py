"""`gyrostat chaos` as its users call it: short, on a real job, which is paced so that there is time for faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.gyrostat_process import gyrostat

SCRIPT = """
import sys

import torch

import gyrostat

job = gyrostat.init(seed=4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(96, 4)), batch_size=2, shuffle=True)
job.track(model=model, optimizer=optimizer)
for epoch in job.epochs(int(sys.argv[1])):
    for step in job.steps(loader):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def chaos(tmp_path: Path, *options: str) -> tuple[int, list[str], dict[str, Any]]:
    (tmp_path / "train.py").write_text(SCRIPT)
    verdict = tmp_path / "verdict.json"
    code, out, err = gyrostat(
        *("chaos", "-n", "4", "-w", "2", "--paced", "200", "--checkpoint-every", "10", "--every", "0.5"),
        *("--json", str(verdict), *options, "train.py", "25"),
        cwd=tmp_path,
    )
    assert verdict.exists(), err
    return code, out, json.loads(verdict.read_text())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--nodes", "1", "--seed", "214"], id="one machine"),
        pytest.param(
            ["--nodes", "2", "--store", "etcd", "--seed", "1037"],
            id="agents and etcd",
            marks=pytest.mark.skipif(
                shutil.which("etcd") is None, reason="needs Debian's package etcd-server"
            ),
        ),
        pytest.param(["--cluster", "--seed", "258"], id="cluster"),
    ],
)
def test_a_job_that_survives_it(tmp_path: Path, options: list[str]) -> None:
    """Three faults, or as many as hit something before the job is over: from its start on."""
    code, out, verdict = chaos(tmp_path, *options, "--faults", "3")
    assert (code, verdict["ok"]) == (0, True), "\n".join(out)
    assert verdict["faults"]
    assert verdict["steps"] == 300
    assert all(set(round["samples"]) == {verdict["samples"]} == {25 * 96} for round in verdict["rounds"])
    assert any("verdict: equal" in line for line in out)


@pytest.mark.full
def test_a_job_whose_result_depends_on_its_workers_does_not(tmp_path: Path) -> None:
    """Its learning rate comes from how many processes there have been: another one after a death, another result."""
    script = SCRIPT.replace("import sys\n", "import os\nimport sys\n").replace(
        "        optimizer.step()",
        "        optimizer.param_groups[0]['lr'] = 0.01 / (1 + len(os.listdir('.')))\n"
        "        open(f'mark-{os.getpid()}', 'w').close()\n        optimizer.step()",
    )
    (tmp_path / "train.py").write_text(script)
    code, out, err = gyrostat(
        *(
            "chaos",
            "-n",
            "2",
            "-w",
            "1",
            "--seed",
            "1",
            "--paced",
            "200",
            "--nodes",
            "1",
            "--faults",
            "4",
            "--every",
            "0.3",
        ),
        *("--keep", "kept", "train.py", "10"),
        cwd=tmp_path,
    )
    assert code == 1, err
    assert any("NOT EQUAL" in line for line in out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "2", "-w", "3"], "3 workers cannot share 2"),
        (["--minutes", "0"], "--minutes and --every must be more than 0"),
        (["--nodes", "0"], "--nodes must be 1 or more, got 0"),
        (["--cluster", "--store", "etcd"], "--cluster runs the job in a cluster"),
        (["--cluster", "--paced", "100,200"], "all devices have one pace"),
    ],
)
def test_what_cannot_be(tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, _, err = gyrostat("chaos", *options, "train.py", "1", cwd=tmp_path)
    assert code == 2
    assert words in err[-1]

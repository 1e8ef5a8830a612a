"""`gyrostat profile-device` as its users start it: its file goes straight into `gyrostat plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyrostat.cli.main import build_app
from gyrostat.core.errors import UsageError
from tests.cli.gyrostat_process import gyrostat

SCRIPT = """
import torch
import gyrostat

job = gyrostat.init(seed=5)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(96, 6)), batch_size=7, shuffle=True)
job.track(model=model, optimizer=optimizer)
for epoch in job.epochs(9):
    for step in job.steps(loader):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_from_the_device_to_the_plan(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    known = {"workload": "train", "throughput": {"p100": {"4": 9.0}}, "communication": {"p100": {"2": 0.5}}}
    file = tmp_path / "profiles.json"
    file.write_text(json.dumps(known))
    options = ["--batches", "4,8", "--steps", "5", "--type", "here", "--profile", str(file)]
    code, out, err = gyrostat("profile-device", *options, "train.py", cwd=tmp_path)
    assert (code, out) == (0, []), err
    assert [line.split(":")[1].strip() for line in err] == [
        "batch 4",
        "batch 8",
        "exchange among 2 workers",
    ]
    found = json.loads(file.read_text())
    assert found["throughput"]["p100"] == {"4": 9.0}
    assert list(found["throughput"]["here"]) == ["4", "8"]
    planned = CliRunner().invoke(
        build_app(),
        ["plan", "--profile", str(file), "--devices", "here:2,p100:1", "--virtual-workers", "4", "--json"],
        catch_exceptions=False,
    )
    (answer,) = json.loads(planned.output)
    assert sum(answer["counts"]["here"]) == 4  # the other one is far too slow


@pytest.mark.parametrize("options", [["--batches", "4,x"], ["--batches", "0"], ["--workers", "none"]])
def test_numbers_that_cannot_be(tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(UsageError, match="got"):
        CliRunner().invoke(build_app(), ["profile-device", *options, "train.py"], catch_exceptions=False)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "profiles.json"
    file.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        CliRunner().invoke(
            build_app(), ["profile-device", "--profile", str(file), "train.py"], catch_exceptions=False
        )

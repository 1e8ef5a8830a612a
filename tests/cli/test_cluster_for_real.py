"""From `up` to `down`: a real cluster in a process of its own, asked by the verbs alone."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gyrostat.cli.main import build_app
from tests.cli.gyrostat_process import finish, running
from tests.conftest import Launch

SCRIPT = """
import torch

import gyrostat

job = gyrostat.init(seed=5)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(96, 6), torch.randint(3, (96,)))
loader = job.dataloader(data, batch_size=3, shuffle=True)
job.track(model=model, optimizer=optimizer)
for epoch in job.epochs(2):
    for step in job.steps(loader):
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        job.log(lr=0.01)
print("the end, after step", job.step)
"""


EXAMPLE = re.findall(
    r"```python\n(.*?)```",
    (Path(__file__).parents[2] / "docs/reference/cluster-api.md").read_text(),
    re.DOTALL,
)[0]


def invoke(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(build_app(), args, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def parsed(*args: str) -> Any:
    return json.loads(invoke(*args))


def test_a_day_in_the_life_of_a_cluster(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "mnist" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    monkeypatch.setenv("GYROSTAT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("GYROSTAT_CLUSTER", raising=False)
    monkeypatch.chdir(script.parent)
    with running("up", "--devices", "cpu:2", "--listen", "127.0.0.1:0", cwd=tmp_path) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith("gyrostat: a cluster of 2 cpu at http://127.0.0.1:")

        said = invoke("submit", "--follow", "-n", "4", "--reduction", "ddp", "train.py")
        fixed = launch(script, virtual_workers=4, workers=1).digest
        assert "the end, after step 16\n" in said
        assert "[job] step 15  lr 0.01" in said
        assert said.startswith("gyrostat: submitted train as j1\n")
        assert said.endswith(f"gyrostat: train (j1) finished after step 16, digest {fixed}\n")
        job = parsed("status", "train", "--json")["job"]
        assert (job["state"], job["step"], job["digest"]) == ("finished", 16, fixed)
        metrics = [json.loads(line) for line in invoke("logs", "--source", "metrics", "j1").splitlines()]
        assert [line["step"] for line in metrics] == list(range(16))
        assert len(list((tmp_path / "state/jobs/j1/logs/tensorboard").glob("events.out.tfevents.*"))) == 1

        points = [json.loads(line) for line in invoke("logs", "--source", "curves", "j1").splitlines()]
        assert points[-1]["step"] == 16
        assert all(point["loss"] > 0 for point in points)

        code = EXAMPLE.replace("/home/me/mnist", str(script.parent))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "docs/reference/cluster-api.md", "exec"), {})
        lines = printed.getvalue().splitlines()
        assert lines[-1] == launch(script, virtual_workers=8, workers=1, reduction=None).digest
        assert any("the end, after step 8" in line for line in lines)

        (script.parent / "broken.py").write_text("def load():\n    raise ValueError('no data')\n\nload()\n")
        said = invoke("submit", "--follow", "broken.py", code=1)
        assert "[0]     raise ValueError('no data')\n[0] ValueError: no data\n" in said
        assert said.endswith("broken (j3) failed: worker 0 raised ValueError: no data\n")
        assert parsed("status", "j3", "--json")["job"]["last_lines"][-1] == "ValueError: no data"

        kinds = [line.split()[3] for line in invoke("events", "--job", "j1").splitlines()]
        assert kinds[:2] == ["submitted", "started"]
        assert kinds[-1] == "finished"
        assert parsed("replay", "--json")["difference"] is None
        assert "0 running, 0 waiting, 2 finished, 1 failed" in invoke("top")

        invoke("down")
        assert finish(daemon)[0] == 0
    assert invoke("status") == "no job is running\n"

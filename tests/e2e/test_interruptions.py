"""A real `gyrostat run` that is asked for checkpoints, stopped and killed, and still ends with the same bits."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.gyrostat_process import finish, gyrostat, running

SCRIPT = """
import pathlib, signal, sys, time, torch, gyrostat
from torch.utils.data import TensorDataset
job = gyrostat.init(seed=3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters())
job.track(model=model, optimizer=optimizer)
loader = job.dataloader(TensorDataset(torch.arange(480.0).view(60, 8) / 480), batch_size=4, shuffle=True)
for epoch in job.epochs(int(sys.argv[1])):
    for step in job.steps(loader):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if job.is_main and job.step == 40:
            print("forty", flush=True)
        if job.step >= 40 and sys.argv[2:] and not any(pathlib.Path("checkpoints").glob("step-*")):
            time.sleep(0.05)  # so that it is not over before it has been asked for one
        elif job.step >= 40 and sys.argv[2:] == ["pause"] and job.is_main:
            print("saved", flush=True)
            signal.pause()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run_options(
    script: Path, workers: int, name: str = "checkpoints", epochs: str = "60"
) -> list[str | Path]:
    checkpoints = script.parent / name
    report = script.parent / "report.json"
    return [
        "run",
        "-n",
        "3",
        "-w",
        str(workers),
        "--checkpoint-dir",
        checkpoints,
        "--report",
        report,
        script,
        epochs,
    ]


def wait_for_forty(process: subprocess.Popen[str], word: str = "forty") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    pytest.fail(f"the run ended before it printed {word!r}")


def report(script: Path) -> dict[str, object]:
    read: dict[str, object] = json.loads((script.parent / "report.json").read_text())
    return read


def test_stopped_by_sigterm_and_killed_and_resumed(script: Path) -> None:
    code, _, err = gyrostat(*run_options(script, 1, "undisturbed"), cwd=script.parent)
    assert code == 0, err
    undisturbed = report(script)
    assert undisturbed["steps"] == 300

    with running(*run_options(script, 2), "slow", cwd=script.parent) as process:
        wait_for_forty(process)
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    [first] = (script.parent / "checkpoints").glob("step-*")
    assert 40 < int(first.name[5:]) < 300

    code, _, err = gyrostat(*run_options(script, 3), cwd=script.parent)
    assert code == 0, err
    resumed = report(script)
    assert resumed["resumed_from"] == str(first)
    assert resumed["digest"] == undisturbed["digest"]


def test_asked_for_a_checkpoint_by_signal(script: Path) -> None:
    with running(*run_options(script, 2), "slow", cwd=script.parent) as process:
        wait_for_forty(process)
        process.send_signal(signal.SIGUSR1)
        code, _, err = finish(process)
    assert code == 0, err
    asked, last = sorted((script.parent / "checkpoints").glob("step-*"))
    assert 40 < int(asked.name[5:]) < 300
    assert last.name == "step-00000300"


def test_a_killed_run_leaves_nothing_and_goes_on(script: Path) -> None:
    options = run_options(script, 2)
    options[1:1] = ["--checkpoint-every", "10"]
    with running(*options, "pause", cwd=script.parent) as process:
        wait_for_forty(process, "saved")
        process.kill()
        finish(process)  # returns when nobody holds its pipes any more: its workers are gone too
    newest = max((script.parent / "checkpoints").glob("step-*")).name
    code, _, err = gyrostat(*run_options(script, 1), cwd=script.parent)
    assert code == 0, err
    assert Path(str(report(script)["resumed_from"])).name == newest


def test_asked_for_a_checkpoint_by_command(script: Path) -> None:
    with running(*run_options(script, 2, epochs="1000000"), cwd=script.parent) as process:
        wait_for_forty(process)
        code, out, err = gyrostat("checkpoint", "save", script.parent / "checkpoints", cwd=script.parent)
        assert code == 0, err
        assert Path(out[-1].strip()).name.startswith("step-")
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 128 + signal.SIGTERM

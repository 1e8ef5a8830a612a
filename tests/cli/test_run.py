"""`gyrostat run` from end to end: real processes, real signals."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gyrostat.core import logs
from gyrostat.job.control import run_file
from tests.cli.gyrostat_process import finish, gyrostat, running
from tests.job.worker_doubles import Departure

TRAIN = """
import os, sys, time, torch, gyrostat

job = gyrostat.init(seed=7)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.arange(256.0).view(64, 4) / 256)
train = job.dataloader(data, batch_size=2, shuffle=True)
job.track(model=model, optimizer=optimizer)
for epoch in job.epochs(int(os.environ.get("EPOCHS", "2"))):
    for step in job.steps(train):
        if job.step == 3 and os.path.exists("wait"):
            print("waiting", flush=True)
            while os.path.exists("wait"):
                time.sleep(0.01)
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    job.log(epoch_done=epoch)
print("arguments", sys.argv[1:])
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_a_whole_run(directory: Path) -> None:
    code, out, err = gyrostat(
        *("run", "--virtual-workers", "4", "--placement", "3,1", "--report", "r.json", "--log-dir", "logs"),
        *("train.py", "--lr", "1", "--workers", "9"),
        cwd=directory,
    )
    assert code == 0, err
    arguments = "arguments ['--lr', '1', '--workers', '9']"
    assert sorted(out) == [
        "job      │ step 16  epoch_done 1",
        "job      │ step 8  epoch_done 0",
        f"worker 0 │ {arguments}",
        f"worker 1 │ {arguments}",
    ]
    report = json.loads((directory / "r.json").read_text())
    assert (report["steps"], report["samples"], report["virtual_workers"], report["workers"]) == (
        16,
        128,
        4,
        2,
    )
    assert len(report["losses"]) == 16
    assert report["logs"] == [{"step": 8, "epoch_done": 0.0}, {"step": 16, "epoch_done": 1.0}]
    assert err[-2].startswith("gyrostat: 16 steps, 128 samples in ")
    assert err[-1] == f"gyrostat: digest {report['digest']}"
    assert (directory / "logs/worker-1.log").read_text() == arguments + "\n"


def test_an_exception_ends_with_that_workers_traceback(directory: Path) -> None:
    (directory / "bad.py").write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\nsignal.pause()\n"
    )
    code, out, err = gyrostat("run", "--workers", "2", "--report", "r.json", "bad.py", cwd=directory)
    assert (code, out) == (1, [])
    assert err == [
        "worker 1 │ Traceback (most recent call last):",
        f'worker 1 │   File "{directory / "bad.py"}", line 3, in <module>',
        "worker 1 │     raise ValueError('boom')",
        "worker 1 │ ValueError: boom",
        "gyrostat: error: worker 1 raised ValueError: boom",
    ]
    report = json.loads((directory / "r.json").read_text())
    assert (report["failure"]["worker"], report["digest"]) == (1, None)


def test_a_job_that_was_stopped_goes_on_to_the_same_digest(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM at step 3 or soon after; resumed on fewer workers, it ends as if nothing had been."""
    monkeypatch.setenv("EPOCHS", "30")
    (directory / "wait").touch()
    args = ["run", "-n", "4", "--checkpoint-dir", "ckpt", "--report"]
    with running(*args, "cut.json", "-w", "2", "train.py", cwd=directory) as process:
        assert process.stdout is not None
        assert [process.stdout.readline()[9:] for _ in range(2)] == ["│ waiting\n"] * 2
        found = run_file.find(directory / "ckpt")
        assert found is not None
        assert found.pid == process.pid
        process.send_signal(signal.SIGTERM)
        (directory / "wait").unlink()
        code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM
    assert not (directory / "ckpt/run.json").exists()
    cut = json.loads((directory / "cut.json").read_text())
    assert cut["stopped_by"] == "SIGTERM"
    assert [checkpoint["step"] for checkpoint in cut["checkpoints"]] == [cut["steps"]]
    assert 3 <= cut["steps"] < 240
    assert f"gyrostat: stopped by SIGTERM after step {cut['steps']}" in err[-1]

    code, _, err = gyrostat(*args, "rest.json", "train.py", cwd=directory)
    assert code == 0, err
    rest = json.loads((directory / "rest.json").read_text())
    assert rest["resumed_from"] == cut["checkpoints"][0]["path"]
    gyrostat("run", "-n", "4", "--report", "whole.json", "train.py", cwd=directory)
    whole = json.loads((directory / "whole.json").read_text())
    assert cut["losses"] + rest["losses"] == whole["losses"]
    assert rest["digest"] == whole["digest"]


def test_ctrl_c_ends_a_job_without_checkpoints_at_once(directory: Path) -> None:
    (directory / "wait.py").write_text("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    with running("run", "--workers", "2", "--quiet", "wait.py", cwd=directory) as process:
        assert process.stdout is not None
        departures = [Departure(int(process.stdout.readline().split()[-1])) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
    assert (code, err) == (128 + signal.SIGINT, [])
    for departure in departures:
        departure.wait()


def test_the_second_ctrl_c_kills_what_does_not_stop(directory: Path) -> None:
    (directory / "deaf.py").write_text(
        """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print(os.getpid())
signal.sigwait([signal.SIGINT])
print("heard")
signal.pause()
"""
    )
    with running("run", "--checkpoint-dir", "ckpt", "deaf.py", cwd=directory) as process:
        assert process.stdout is not None
        departure = Departure(int(process.stdout.readline().split()[-1]))
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "worker 0 │ heard\n"
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] == 128 + signal.SIGINT
    departure.wait()


def test_exit_codes_are_the_scripts(directory: Path) -> None:
    (directory / "package").mkdir()
    (directory / "package/__init__.py").write_text("")
    (directory / "package/leave.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    code, out, err = gyrostat("run", "-m", "package.leave", "7", cwd=directory)
    assert (code, out, err) == (7, [], ["gyrostat: error: worker 0 exited with code 7"])


def test_it_ends_quietly_when_nobody_reads_any_more(directory: Path) -> None:
    (directory / "talk.py").write_text("import os\nprint(os.getpid())\nwhile True:\n    print('x' * 1000)\n")
    with running("run", "talk.py", cwd=directory) as process:
        assert process.stdout is not None
        departure = Departure(int(process.stdout.readline().split()[-1]))
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""
    departure.wait()


def test_a_worker_that_never_pauses_can_be_stopped(directory: Path) -> None:
    (directory / "talk.py").write_text("while True:\n    print('x' * 1000)\n")
    with running("run", "--quiet", "talk.py", cwd=directory) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 128 + signal.SIGTERM


def test_a_checkpoint_of_another_number_of_virtual_workers_is_refused(directory: Path) -> None:
    assert gyrostat("run", "-n", "2", "--checkpoint-dir", "c", "train.py", cwd=directory)[0] == 0
    code, _, err = gyrostat("run", "-n", "4", "--checkpoint-dir", "c", "train.py", cwd=directory)
    assert code == 2
    assert err[0] == "gyrostat: error: there are checkpoints, but none can be used:"
    assert "virtual_workers is 2 there and 4 here" in err[1]


def test_log_options_reach_workers(directory: Path) -> None:
    (directory / "train.py").write_text(
        "import os, gyrostat\n"
        "gyrostat.init()\n"
        "print(os.environ['GYROSTAT_LOG'], os.environ['GYROSTAT_LOG_FORMAT'])\n"
    )
    code, out, err = gyrostat("run", "-vv", "--log-format", "json", "train.py", cwd=directory)
    assert (code, out) == (0, ["worker 0 │ DEBUG json"]), err
    assert [line for line in err if not logs.is_json_record(line)] == []


def test_workers_log_their_own_number(directory: Path) -> None:
    (directory / "train.py").write_text("import gyrostat\ngyrostat.init()\n")
    code, _, err = gyrostat("run", "-v", "-n", "2", "-w", "2", "train.py", cwd=directory)
    assert code == 0, err
    for member in (0, 1):
        mine = [line for line in err if line.startswith(f"worker {member} │")]
        assert any(line.endswith(f"worker: worker {member} starts") for line in mine), err
        assert any(line.endswith(f"worker: worker {member} exits with code 0") for line in mine), err


def test_options_of_several_nodes_need_a_store(directory: Path) -> None:
    code, out, err = gyrostat("run", "--nodes", "2", "train.py", cwd=directory)
    assert (code, out) == (2, [])
    assert "--nodes, --node and --listen are for a job on several nodes" in err[0]

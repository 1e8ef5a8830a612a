"""Jobs of several real processes: who is blamed, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.events import EventKind
from gyrostat.core.job import RecoveryMode
from gyrostat.core.placement import Placement
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import ColdStart, WorkerForkServer
from tests.conftest import Launch
from tests.job.worker_doubles import Departure, Listener

WAIT_FOREVER = "import os, signal; print(os.getpid()); signal.pause()"


def test_the_worker_that_raised_is_blamed_and_the_rest_ended(launch: Launch) -> None:
    script = """
        import os, signal
        print(os.getpid())
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        signal.pause()
    """
    outcome = launch(script, virtual_workers=3, workers=3, check=False)
    assert outcome.failure is not None
    assert str(outcome.failure) == "worker 1 raised ValueError: boom"
    assert outcome.exit_codes[1] == 1
    assert {outcome.exit_codes[0], outcome.exit_codes[2]} == {-signal.SIGTERM}


def test_a_worker_that_does_not_end_is_killed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyrostat.job.control.worker_tracker.KILL_GRACE_S", 0.05)
    script = """
        import os, signal, sys
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.mkfifo("never")
            open("never").read()
        while not os.path.exists("never"):
            os.sched_yield()
        sys.exit(4)
    """
    outcome = launch(script, virtual_workers=2, workers=2, check=False)
    assert outcome.exit_codes == (-signal.SIGKILL, 4)
    assert outcome.exit_code == 4


def test_a_killed_worker_is_reported(launch: Launch) -> None:
    def kill_the_second(worker: int, line: str) -> None:
        if worker == 1:
            os.kill(int(line), signal.SIGKILL)

    outcome = launch(
        WAIT_FOREVER, virtual_workers=2, workers=2, check=False, observer=Listener(react=kill_the_second)
    )
    assert outcome.failure is not None
    assert str(outcome.failure).startswith("worker 1 was killed by SIGKILL")
    assert outcome.exit_code == 128 + signal.SIGKILL


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_that_ends_its_process_has_no_result(launch: Launch, workers: int) -> None:
    """Its exit code is 0, but it has not reached its end. It is not run again: it would do the same."""
    outcome = launch(
        "import os; print('once'); os._exit(0)",
        virtual_workers=workers,
        workers=workers,
        restarts=3,
        observer=(listener := Listener()),
        check=False,
    )
    assert outcome.exit_codes == (0,) * workers
    assert outcome.exit_code == 1
    assert str(outcome.failure).endswith(" exited before its script had ended")
    assert listener.of(0) == ["once"]


def test_the_dead_worker_is_blamed_and_not_the_one_that_misses_it(launch: Launch) -> None:
    """Real collectives: the survivor raises PeerLost, mostly before the death of the other is known."""
    script = """
        import os, signal, torch, gyrostat
        job = gyrostat.init()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.ones(64, 2))
        train = job.dataloader(data, batch_size=2)
        job.track(model=model, optimizer=optimizer)
        for step in job.steps(train):
            if job.step == 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            for x, in step:
                step.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    """
    outcome = launch(script, virtual_workers=2, workers=2, recovery=RecoveryMode.CHECKPOINT, check=False)
    assert outcome.failure is not None
    assert str(outcome.failure).startswith("worker 1 was killed by SIGKILL")
    assert outcome.exit_codes[1] == -signal.SIGKILL
    assert outcome.events[-1].reason == str(outcome.failure)


def test_what_a_script_started_dies_with_it(launch: Launch) -> None:
    script = """
        import os, subprocess
        child = subprocess.Popen(["sleep", "600"])
        os.mkfifo("go")
        print(child.pid)
        open("go").read()
    """
    departures: list[Departure] = []

    def release(worker: int, line: str) -> None:
        departures.append(Departure(int(line)))
        (launch.directory / "go").write_text("")

    launch(script, observer=Listener(react=release))
    departures[0].wait()


def test_an_observer_that_raises_leaves_nothing_running(launch: Launch) -> None:
    departures: list[Departure] = []

    def stumble(worker: int, line: str) -> None:
        departures.append(Departure(int(line)))
        if len(departures) == 2:
            raise RuntimeError("stumbled")

    with pytest.raises(RuntimeError, match="stumbled"):
        launch(WAIT_FOREVER, virtual_workers=2, workers=2, observer=Listener(react=stumble))
    for departure in departures:
        departure.wait()
    launch("print('the fork server serves the next job')")


def test_signals_of_a_program_that_uses_the_library_stay_its_own(launch: Launch) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    during: list[object] = []
    launch(
        "print('x')",
        observer=Listener(react=lambda worker, line: during.extend(signal.getsignal(n) for n in numbers)),
    )
    assert during == before


def test_output_is_kept_in_files(launch: Launch, tmp_path: Path) -> None:
    script = """
        import os, sys
        print('hello from', os.environ['RANK'], flush=True)
        while not os.path.getsize(sys.argv[1]):  # the failure of worker 1 ends worker 0
            os.sched_yield()
        assert os.environ['RANK'] == '0'
    """
    logs = tmp_path / "logs"
    launch(script, virtual_workers=2, workers=2, args=[str(logs / "worker-0.log")], log_dir=logs, check=False)
    assert (tmp_path / "logs/worker-0.log").read_text() == "hello from 0\n"
    kept = (tmp_path / "logs/worker-1.log").read_text().splitlines()
    assert (kept[0], kept[1], kept[-1]) == (
        "hello from 1",
        "Traceback (most recent call last):",
        "AssertionError",
    )


def test_the_reference_has_a_process_for_every_virtual_worker(launch: Launch) -> None:
    listener = Listener()
    outcome = launch(
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])",
        virtual_workers=3,
        workers=1,
        reference=True,
        observer=listener,
    )
    assert outcome.workers == outcome.virtual_workers == 3
    assert sorted(line for _, _, line in listener.lines) == ["0 3", "1 3", "2 3"]


def test_a_cold_start_does_the_same(launch: Launch, tmp_path: Path) -> None:
    request = RunRequest(
        program=Program(name=str(launch.script("import sys; print(sys.argv[1]); sys.exit(6)")), args=("a",)),
        placement=Placement.even(1, 1),
        cwd=tmp_path,
    )
    listener = Listener()
    with ColdStart() as cold:
        outcome = run_job(request, parent=cold, observer=listener)
    assert listener.of(0) == ["a"]
    assert (outcome.exit_codes, str(outcome.failure)) == ((6,), "worker 0 exited with code 6")


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    missing = RunRequest(program=Program(name="missing.py"), placement=Placement.even(1, 1), cwd=tmp_path)
    with pytest.raises(UsageError, match=r"there is no script 'missing.py'"):
        run_job(missing)


def test_without_its_fork_server_a_run_fails_and_its_workers_are_gone(tmp_path: Path, launch: Launch) -> None:
    """Its outcome says so: there is a report."""
    departures: list[Departure] = []
    with WorkerForkServer() as parent:

        def kill_the_parent(worker: int, line: str) -> None:
            departures.append(Departure(int(line)))
            os.kill(parent.pid, signal.SIGKILL)

        request = RunRequest(
            program=Program(name=str(launch.script(WAIT_FOREVER))),
            placement=Placement.even(1, 1),
            cwd=tmp_path,
        )
        outcome = run_job(request, parent=parent, observer=Listener(react=kill_the_parent))
        assert (outcome.exit_code, str(outcome.failure)) == (137, "worker 0 was killed by SIGKILL")
        departures[0].wait()


TRAINS = """
    import os
    import torch

    import gyrostat

    job = gyrostat.init(seed=4)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = job.dataloader([torch.full((4,), float(i)) for i in range(24)], batch_size=2)
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(loader):
        for x in step:
            step.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        if job.step == 2 and job.is_main:
            print(os.getppid(), flush=True)
"""


def test_a_killed_fork_server_is_replaced_and_the_job_begins_again(tmp_path: Path, launch: Launch) -> None:
    undisturbed = launch(TRAINS, virtual_workers=2, workers=2)
    killed: set[int] = set()
    with WorkerForkServer() as server:

        def kill_once(worker: int, line: str) -> None:
            if not killed:
                killed.add(int(line))
                os.kill(int(line), signal.SIGKILL)

        request = RunRequest(
            program=Program(name=str(launch.script(TRAINS))),
            placement=Placement.even(2, 2),
            failures=FailurePolicy(restarts=1),
            cwd=tmp_path,
        )
        outcome = run_job(request, parent=server, observer=Listener(react=kill_once)).check()
        assert server.pid not in killed
    assert (outcome.digest, outcome.losses) == (undisturbed.digest, undisturbed.losses)
    assert [event.recovered_from for event in outcome.events if event.kind is EventKind.FAILURE] == ["start"]

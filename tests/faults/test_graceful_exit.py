"""SIGTERM to one worker: it leaves at a boundary, the others go on, and the bits stay the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from gyrostat.core.events import Event, EventKind
from gyrostat.core.job import CheckpointPolicy, RecoveryMode
from gyrostat.job.control.instructions import ReconfigurationDone
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.worker_tracker import JobFailure
from gyrostat.job.processes.output import OutputStream
from tests.conftest import Launch

SCRIPT = """
    import os
    import time

    import torch

    import gyrostat

    print(os.getpid())
    job = gyrostat.init(seed=4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(96, 4)), batch_size=2, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(8):
        for step in job.steps(loader):
            if job.step == 5:
                print("there")
            for (x,) in step:
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if os.path.exists("slow"):
                time.sleep(0.1)
"""
FAST = (1e6,)


class Terminates(NullObserver):
    """When worker 0 is at step 5, sends SIGTERM to some of the workers; once, if the job is started again.

    The job is slow until they have left, or have taken it with them, so that it does not come to its end before.
    """

    def __init__(self, launch: Launch, *workers: int) -> None:
        self._workers, self._leavers = workers, len(workers)
        self._slow = launch.directory / "slow"
        self._slow.touch()
        self.pids: dict[int, int] = {}

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        if line.isdigit():
            self.pids[worker] = int(line)
        elif line == "there" and worker == 0:
            victims, self._workers = self._workers, ()
            for victim in victims:
                os.kill(self.pids[victim], signal.SIGTERM)

    def resized(self, done: ReconfigurationDone) -> None:
        self._leavers -= 1
        if not self._leavers:
            self._slow.unlink()

    def died(self, failure: JobFailure, wait: float, checkpoint: int | None) -> None:
        self._slow.unlink()

    def over(self, outcome: Outcome) -> None:
        self._slow.unlink(missing_ok=True)


def resizes(events: Sequence[Event]) -> list[tuple[int | None, int | None]]:
    return [(event.from_workers, event.to_workers) for event in events if event.kind is EventKind.RESIZE]


@pytest.mark.parametrize(
    ("leavers", "sizes"),
    [((1,), [(3, 2)]), ((0,), [(3, 2)]), ((0, 2), [(3, 2), (2, 1)])],
    ids=["one", "worker 0", "two"],
)
def test_others_go_on(launch: Launch, leavers: tuple[int, ...], sizes: list[tuple[int, int]]) -> None:
    undisturbed = launch(SCRIPT, virtual_workers=4, workers=3, paced=FAST)
    outcome = launch(SCRIPT, virtual_workers=4, workers=3, paced=FAST, observer=Terminates(launch, *leavers))
    assert outcome.digest == undisturbed.digest
    assert (outcome.losses, outcome.samples) == (undisturbed.losses, undisturbed.samples)
    assert outcome.exit_codes == (0, 0, 0)
    assert resizes(outcome.events) == sizes
    reasons = [event.reason for event in outcome.events if event.kind is EventKind.RESIZE]
    assert all("asked to leave by SIGTERM" in reason for reason in reasons)


def test_all_of_them_is_the_job(launch: Launch, tmp_path: Path) -> None:
    """One after the other leaves; the last one checkpoints and the job stops. The next run ends as if nothing had been."""
    undisturbed = launch(SCRIPT, virtual_workers=4, workers=2, paced=FAST)
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    outcome = launch(
        SCRIPT,
        virtual_workers=4,
        workers=2,
        paced=FAST,
        checkpoint=policy,
        observer=Terminates(launch, 0, 1),
        check=False,
    )
    assert outcome.stopped
    assert outcome.exit_codes == (0, 0)
    assert (outcome.stopped_by, outcome.exit_code) == (signal.SIGTERM, 128 + signal.SIGTERM)
    assert outcome.checkpoints[-1].step == outcome.steps
    rest = launch(SCRIPT, virtual_workers=4, workers=1, paced=FAST, checkpoint=policy)
    assert rest.first_step == outcome.steps
    assert rest.digest == undisturbed.digest


def test_a_lone_worker_that_checkpoints_stops_the_job_without_a_result(
    launch: Launch, tmp_path: Path
) -> None:
    outcome = launch(
        SCRIPT,
        virtual_workers=2,
        workers=1,
        paced=FAST,
        checkpoint=CheckpointPolicy(directory=str(tmp_path / "checkpoints")),
        observer=Terminates(launch, 0),
        check=False,
    )
    assert outcome.stopped
    assert (outcome.stopped_by, outcome.exit_code) == (signal.SIGTERM, 128 + signal.SIGTERM)
    assert outcome.checkpoints[-1].step == outcome.steps


def test_a_lone_worker_that_does_not_checkpoint_dies_of_it(launch: Launch) -> None:
    outcome = launch(
        SCRIPT, virtual_workers=2, workers=1, paced=FAST, observer=Terminates(launch, 0), check=False
    )
    assert outcome.exit_codes == (-signal.SIGTERM,)
    assert str(outcome.failure) == "worker 0 was killed by SIGTERM"


SLOW = SCRIPT.replace(
    "            for (x,) in step:\n",
    """
            while job.step == 5 and not os.path.exists("restarted"):  # a step that never ends
                os.sched_yield()
            for (x,) in step:
""",
).replace(
    "    job = gyrostat.init(seed=4)\n",
    """
    job = gyrostat.init(seed=4)
    if job.is_main:
        open("restarted" if os.path.exists("first") else "first", "w").close()
""",
)


def test_a_worker_without_a_boundary_in_time_is_killed_and_the_job_resumes_from_its_checkpoint(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyrostat.job.control.worker_tracker.KILL_GRACE_S", 0.1)
    undisturbed = launch(SCRIPT, virtual_workers=4, workers=2, paced=FAST)
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=2)
    outcome = launch(
        SLOW,
        virtual_workers=4,
        workers=2,
        paced=FAST,
        checkpoint=policy,
        restarts=1,
        grace_s=0.3,
        recovery=RecoveryMode.CHECKPOINT,
        observer=Terminates(launch, 1),
    )
    assert outcome.digest == undisturbed.digest
    (failure,) = [event for event in outcome.events if event.kind is EventKind.FAILURE]
    assert failure.recovered_from == "checkpoint"
    assert failure.reason == (
        "worker 1 was asked to leave by SIGTERM, and no boundary to leave at came within its grace"
    )


def test_children_of_the_script_do_not_speak_for_it(launch: Launch) -> None:
    """A process that the script forked has its handlers, and dies of the signal as it would elsewhere."""
    script = """
        import os, signal, time
        import torch, gyrostat
        job = gyrostat.init()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = job.dataloader(torch.utils.data.TensorDataset(torch.ones(64, 2)), batch_size=2)
        job.track(model=model, optimizer=optimizer)
        for step in job.steps(loader):
            child = os.fork()
            if child == 0:
                time.sleep(100)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
            for (x,) in step:
                step.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    """
    outcome = launch(script, virtual_workers=4, workers=2)
    assert outcome.workers == 2
    assert resizes(outcome.events) == []

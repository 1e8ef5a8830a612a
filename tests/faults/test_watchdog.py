"""User code that hangs: it is shown where, even when it holds the interpreter's lock, and the job can go on without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.events import EventKind
from gyrostat.core.job import CheckpointPolicy
from gyrostat.job.diagnostics.watchdog import Action, WatchdogPolicy
from tests.conftest import Launch

SCRIPT = """
    import pathlib
    import re
    import sys
    import time

    import torch

    import gyrostat

    job = gyrostat.init(seed=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = job.dataloader([torch.tensor([float(i)]) for i in range(48)], batch_size=2, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    how, mark = sys.argv[1], pathlib.Path("hung")


    def hang_here():
        mark.touch()
        if how == "sleeps":
            time.sleep(600)
        elif how == "holds the lock":
            re.match("(a+)+$", "a" * 60 + "b")


    for step in job.steps(loader):
        for x in step:
            if job.step == 3 and step.virtual_rank == 3 and how != "works" and not mark.exists():
                hang_here()
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("how", ["sleeps", "holds the lock"])
def test_a_hanging_worker_is_shown_and_killed(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("gyrostat.job.control.worker_tracker.KILL_GRACE_S", 0.1)
    undisturbed = launch(SCRIPT, virtual_workers=4, workers=2, args=["works"])
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=1)
    outcome = launch(
        SCRIPT,
        virtual_workers=4,
        workers=2,
        args=[how],
        checkpoint=policy,
        restarts=1,
        watchdog=WatchdogPolicy(seconds=4.0, action=Action.END),
        log_dir=tmp_path / "logs",
    )
    assert outcome.digest == undisturbed.digest
    assert outcome.samples == undisturbed.samples
    found = next(
        event
        for event in outcome.events
        if event.kind is EventKind.STANDSTILL and "worker 1 hangs" in event.reason
    )
    assert found.step <= 3  # steps are reported ten times a second
    assert "worker 1 hangs at " in found.reason
    assert " in hang_here, and is killed" in found.reason
    assert "worker 0 hangs" not in found.reason
    assert {"stack of worker 0:", "stack of worker 1:"} <= set(found.evidence)
    (failure,) = [event for event in outcome.events if event.kind is EventKind.FAILURE]
    assert failure.reason.startswith("worker 1 was ended by the watchdog: it hung at ")
    assert "in hang_here" in (tmp_path / "logs" / "worker-1.log").read_text()

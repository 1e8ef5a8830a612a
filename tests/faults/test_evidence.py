"""What is known of a worker that has died: its last lines, its signal, and the samples it was working on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gyrostat.core.backoff import Backoff
from gyrostat.core.events import EventKind
from gyrostat.core.job import CheckpointPolicy
from gyrostat.job.control.worker_tracker import FailureCause
from tests.conftest import Launch

SCRIPT = """
    import os
    import signal
    import sys

    import torch

    import gyrostat

    job = gyrostat.init(seed=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = job.dataloader([torch.tensor([float(i)]) for i in range(24)], batch_size=2, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(2):
        for step in job.steps(loader):
            for x in step:
                if 13.0 in x:
                    print("sample 13 is here")
                    if sys.argv[1] == "kill":
                        os.kill(os.getpid(), signal.SIGSEGV)
                    raise ValueError("thirteen")
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_poison_batch_ends_the_job(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample 13 kills whoever touches it. The job would have restarts left."""
    monkeypatch.setattr("gyrostat.job.control.restarts.DELAY", Backoff(0.01, 0.01))
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=1)
    outcome = launch(
        SCRIPT, virtual_workers=3, workers=2, args=["kill"], checkpoint=policy, restarts=9, check=False
    )
    failure = outcome.failure
    assert failure is not None
    assert failure.cause is FailureCause.POISON
    assert failure.exit_code == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV; 3 workers have died while this micro-batch was running" in failure.summary
    running = failure.evidence.running
    assert running is not None
    assert running.samples is not None
    assert 13 in running.samples
    assert len(running.samples) == 2
    assert failure.evidence.lines[-1] == "sample 13 is here"
    died = [event for event in outcome.events if event.kind is EventKind.FAILURE]
    by_peers, restarted, ended = (event.recovered_from for event in died)
    assert (by_peers, ended) == ("peers", None)
    assert restarted in ("checkpoint", "start"), "whether a checkpoint was in place depends on the machine"
    assert all("    sample 13 is here" in event.evidence for event in died)


def test_an_exception_has_evidence_too(launch: Launch) -> None:
    outcome = launch(SCRIPT, virtual_workers=3, workers=2, args=["raise"], check=False)
    failure = outcome.failure
    assert failure is not None
    assert (failure.cause, failure.exit_code) == (FailureCause.RAISED, 1)
    assert failure.summary == "raised ValueError: thirteen"
    running = failure.evidence.running
    assert running is not None
    assert running.samples is not None
    assert 13 in running.samples
    assert failure.evidence.lines[-1] == "sample 13 is here"


def test_a_worker_that_is_between_micro_batches(launch: Launch) -> None:
    script = SCRIPT.replace(
        "            optimizer.step()\n", "            os.kill(os.getpid(), signal.SIGABRT)\n"
    )
    outcome = launch(script.replace("13.0", "99.0"), virtual_workers=2, workers=1, args=["kill"], check=False)
    assert outcome.failure is not None
    assert outcome.failure.summary == "was killed by SIGABRT"
    assert outcome.failure.evidence.running is None

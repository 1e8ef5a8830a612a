"""A worker is killed, and nobody keeps backups: the job goes on from its newest checkpoint, and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.events import EventKind
from gyrostat.core.job import CheckpointPolicy, RecoveryMode
from tests.conftest import Launch

DIES = """
    import os
    import pathlib
    import signal
    import sys
    import time

    import torch

    import gyrostat

    job = gyrostat.init(seed=4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(60, 4)), batch_size=2, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    deaths = {int(step): f"died-{step}" for step in sys.argv[1:]}
    for epoch in job.epochs(2):
        for step in job.steps(loader):
            for (x,) in step:
                mark = pathlib.Path(deaths.get(job.step, "nowhere/"))
                if step.virtual_rank == 2 and job.step in deaths and not mark.exists():
                    while job.step > 3 and not list(pathlib.Path("checkpoints").glob("step-*")):
                        time.sleep(0.005)  # it is written in the background
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "schedule", [(), ((5, 3), (12, 1))], ids=["on two workers", "while it is being resized"]
)
def test_killed_twice(launch: Launch, tmp_path: Path, schedule: tuple[tuple[int, int], ...]) -> None:
    undisturbed = launch(DIES, virtual_workers=3, workers=2)
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=3)
    outcome = launch(
        DIES,
        virtual_workers=3,
        workers=2,
        args=["2", "8"],
        checkpoint=policy,
        restarts=3,
        schedule=schedule,
        recovery=RecoveryMode.CHECKPOINT,
    )
    assert outcome.digest == undisturbed.digest
    assert outcome.losses == undisturbed.losses
    assert outcome.samples == undisturbed.samples
    deaths = [event for event in outcome.events if event.kind is EventKind.FAILURE]
    assert [event.recovered_from for event in deaths] == ["start", "checkpoint"]
    assert all("was killed by SIGKILL" in event.reason for event in deaths)


def test_not_for_ever(launch: Launch, tmp_path: Path) -> None:
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=3)
    outcome = launch(
        DIES,
        virtual_workers=3,
        workers=2,
        args=["2", "8"],
        checkpoint=policy,
        restarts=1,
        check=False,
        recovery=RecoveryMode.CHECKPOINT,
    )
    assert "was killed by SIGKILL" in str(outcome.failure)


FROM_THE_START = """
    import os
    import pathlib
    import signal
    import sys

    import torch

    import gyrostat

    where, mark = sys.argv[1], pathlib.Path("died")


    def die():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


    if where == "starting" and os.environ["RANK"] == "1" and not mark.exists():
        die()
    job = gyrostat.init(seed=4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(60, 4)), batch_size=2, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    job.log(begins=1.0)
    for step in job.steps(loader):
        for (x,) in step:
            if where == "training" and job.step == 3 and not mark.exists():
                die()
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("where", "workers"), [("starting", 2), ("training", 1)])
def test_without_a_checkpoint_it_begins_again_from_the_start(
    launch: Launch, where: str, workers: int
) -> None:
    """A worker is killed before the first step, or the only one later: nobody has any state, and none is needed."""
    undisturbed = launch(FROM_THE_START, virtual_workers=2, workers=workers, args=["nowhere"])
    outcome = launch(FROM_THE_START, virtual_workers=2, workers=workers, args=[where], restarts=1)
    assert outcome.digest == undisturbed.digest
    assert outcome.losses == undisturbed.losses
    assert (outcome.samples, outcome.logs) == (undisturbed.samples, undisturbed.logs)
    (death,) = [event for event in outcome.events if event.kind is EventKind.FAILURE]
    assert death.recovered_from == "start"

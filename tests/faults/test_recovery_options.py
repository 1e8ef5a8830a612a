"""What else may become of a job that loses a worker: go on inexactly, or wait until there are enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.events import EventKind
from gyrostat.core.job import RecoveryMode, ReductionOrder
from tests.conftest import Launch

SCRIPT = """
    import os
    import pathlib
    import signal
    import sys

    import torch

    import gyrostat

    job = gyrostat.init(seed=4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(96, 4)), batch_size=2, shuffle=True, num_workers=1)
    job.track(model=model, optimizer=optimizer)
    mark = pathlib.Path(sys.argv[1])
    for step in job.steps(loader):
        for (x,) in step:
            mean = job.mean(x.sum())
            if step.virtual_rank == 2 and job.step == 3 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(x).square().mean())
        float(mean)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_approximate(launch: Launch, tmp_path: Path) -> None:
    """What it had computed in this pass is dropped; nothing else is."""
    mark = tmp_path / "died"
    mark.touch()
    undisturbed = launch(SCRIPT, virtual_workers=4, workers=2, args=[str(mark)])
    mark.unlink()
    outcome = launch(
        SCRIPT, virtual_workers=4, workers=2, args=[str(mark)], recovery=RecoveryMode.APPROXIMATE
    )
    (failure,) = [event for event in outcome.events if event.kind is EventKind.FAILURE]
    assert (failure.recovered_from, failure.micro_batches_redone) == ("approximate", 0)
    assert outcome.steps == undisturbed.steps
    assert outcome.samples == undisturbed.samples
    assert outcome.losses[:4] == undisturbed.losses[:4]
    assert outcome.digest != undisturbed.digest


def test_too_few_wait_until_there_are_enough(launch: Launch, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    mark.touch()
    undisturbed = launch(SCRIPT, virtual_workers=4, workers=2, args=[str(mark)])
    mark.unlink()
    outcome = launch(SCRIPT, virtual_workers=4, workers=2, args=[str(mark)], min_workers=2)
    failure, resize = [e for e in outcome.events if e.kind in (EventKind.FAILURE, EventKind.RESIZE)]
    assert (failure.recovered_from, failure.micro_batches_redone, failure.to_workers) == ("peers", 2, 1)
    assert (resize.to_workers, resize.step) == (
        2,
        4,
    )  # the lost pass was completed, and no step begun with too few
    assert outcome.digest == undisturbed.digest
    assert outcome.losses == undisturbed.losses


@pytest.mark.parametrize("order", list(ReductionOrder))
def test_the_death_is_known_before_the_last_gradients_leave(
    launch: Launch, tmp_path: Path, order: ReductionOrder
) -> None:
    """What has been streamed out of the last backward here, but not sent, counts."""
    script = SCRIPT.replace(
        "            step.backward(model(x).square().mean())\n",
        """
            if step.virtual_rank == 1 and job.step == 3 and not (tmp / "never").exists():
                while session.membership().phase != "recovering":
                    os.sched_yield()
            step.backward(model(x).square().mean())
""",
    ).replace(
        "    mark = pathlib.Path(sys.argv[1])\n",
        "    mark = pathlib.Path(sys.argv[1])\n    tmp = mark.parent\n",
    )
    script = script.replace(
        "    import gyrostat\n", "    import gyrostat\n    from gyrostat.engine.script import session\n"
    )
    mark, never = tmp_path / "died", tmp_path / "never"
    for path in (mark, never):
        path.touch()
    undisturbed = launch(script, virtual_workers=4, workers=2, args=[str(mark)], reduction=order)
    for path in (mark, never):
        path.unlink()
    outcome = launch(script, virtual_workers=4, workers=2, args=[str(mark)], reduction=order)
    assert outcome.digest == undisturbed.digest
    assert outcome.losses == undisturbed.losses

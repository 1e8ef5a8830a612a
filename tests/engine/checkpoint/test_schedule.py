"""When checkpoints are due: decided purely, and alike on all workers of a real job."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.job import CheckpointPolicy
from gyrostat.engine.checkpoint import CheckpointSchedule, CheckpointTimer
from tests.conftest import Launch

SCRIPT = """
import time, torch, gyrostat
job = gyrostat.init(seed=1)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = job.dataloader(torch.utils.data.TensorDataset(torch.randn(160, 3)), batch_size=1)
job.track(model=model, optimizer=optimizer)
for step in job.steps(data):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


def test_one_at_a_time() -> None:
    schedule = CheckpointSchedule(every=10)
    due = [schedule.boundary(step, asked=step == 13, written=step == 14) for step in range(1, 21)]
    assert [step for step, taken in enumerate(due, 1) if taken] == [10, 14]  # 20 waits for the writer
    assert schedule.pending
    assert schedule.boundary(21, asked=False, written=True)


def test_the_first_interval_begins_with_training() -> None:
    timer = CheckpointTimer(interval_s=300.0)
    assert [timer.due(now) for now in (1000.0, 1299.0, 1300.0, 1301.0)] == [False, False, True, True]
    timer.took(1301.0)
    assert [timer.due(now) for now in (1600.0, 1601.0)] == [False, True]
    assert timer.waited(1601.0) == 300.0


def test_without_an_interval_none_is_due() -> None:
    timer = CheckpointTimer()
    assert not any(timer.due(now) for now in (0.0, 1e9))


@pytest.mark.parametrize(("stall", "interval"), [(0.5, 300.0), (3.0, 300.0), (6.0, 600.0), (60.0, 6000.0)])
def test_expensive_ones_cost_a_hundredth_of_the_time(stall: float, interval: float) -> None:
    timer = CheckpointTimer(interval_s=300.0, last=0.0, stall_s=stall)
    assert not timer.due(interval - 1)
    assert timer.due(interval)


@pytest.mark.parametrize(("every", "interval"), [(-1, 0.0), (0, -1.0), (0, float("inf"))])
def test_intervals_are_checked(every: int, interval: float) -> None:
    with pytest.raises(
        UsageError, match=r"between checkpoints must be 0 \(never\) or more, in steps and in seconds; got"
    ):
        CheckpointPolicy(directory="c", every=every, interval_s=interval)


def test_all_workers_take_one_by_time_at_the_same_boundary(launch: Launch, tmp_path: Path) -> None:
    """Also after the job has been resized, and the bits are those without."""
    script = launch.script(SCRIPT)
    policy = CheckpointPolicy(directory=str(tmp_path / "ckpt"), interval_s=0.05)
    outcome = launch(script, virtual_workers=4, workers=2, checkpoint=policy, schedule=((20, 3),))
    assert any(checkpoint.step < outcome.steps for checkpoint in outcome.checkpoints)
    assert outcome.digest == launch(script, virtual_workers=4, workers=1).digest

"""A job that is saved and resumed, on any number of workers each time, ends with the bits of one that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyrostat.core.job import CheckpointPolicy
from tests.conftest import Launch
from tests.determinism.test_digests import ZOO

# Features whose state is spread widest: several loops, own buffers, contexts, layouts, gradients left set.
WIDE = (
    "loops",
    "random_dataset",
    "two_passes",
    "accumulation_not_broadcast",
    "gradients_not_zeroed",
    "forward_without_gradient",
    "parameter_groups_and_schedules",
    "unused_parameters",
    "static_graph",
    "grad_scaler",
    "exponential_moving_average",
    "closure",
    "buffers_reassigned",
    "statistics_reset_by_the_script",
)


@pytest.mark.parametrize("name", WIDE)
def test_stopped_everywhere(launch: Launch, tmp_path: Path, name: str) -> None:
    """Stopped after 1, 2, 3 and 4 steps, every time on another placement."""
    reference = launch(ZOO, virtual_workers=4, reference=True, args=[name])
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    for stop, placement in ((1, [4]), (2, [1, 3]), (3, [1, 1, 1, 1])):
        part = launch(ZOO, placement=placement, args=[name], checkpoint=policy, stop_after=stop)
        assert part.stopped
        assert part.steps == stop
    last = launch(ZOO, placement=[3, 1], args=[name], checkpoint=policy)
    assert last.first_step == 3
    assert last.digest == reference.digest
    assert last.losses == reference.losses[3:]


@st.composite
def journeys(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Random cuts of 24 steps, each piece with a random placement of 4 virtual workers."""
    cuts = sorted(draw(st.sets(st.integers(1, 23), min_size=1, max_size=3)))
    pieces = []
    for cut in [*cuts, 24]:
        counts, left = [], 4
        while left:
            counts.append(draw(st.integers(1, left)))
            left -= counts[-1]
        pieces.append((cut, counts))
    return pieces


@given(journey=journeys())
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_journey(
    launch: Launch, tmp_path_factory: pytest.TempPathFactory, journey: list[tuple[int, list[int]]]
) -> None:
    policy = CheckpointPolicy(directory=str(tmp_path_factory.mktemp("journey")))
    whole = launch(ZOO, placement=[4], args=["loops"])
    assert whole.steps == journey[-1][0]
    losses: list[float | None] = []
    for stop, placement in journey:
        part = launch(ZOO, placement=placement, args=["loops"], checkpoint=policy, stop_after=stop)
        losses += part.losses
    assert tuple(losses) == whole.losses
    again = launch(ZOO, placement=[2, 2], args=["loops"], checkpoint=policy)
    assert again.digest == whole.digest


def test_a_finished_job_has_nothing_left_to_do(launch: Launch, tmp_path: Path) -> None:
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    first = launch(ZOO, placement=[2, 1], args=["loops"], checkpoint=policy)
    again = launch(ZOO, placement=[3], args=["loops"], checkpoint=policy)
    assert again.losses == ()
    assert again.steps == first.steps
    assert again.digest == first.digest


SCRIPT = """
import sys, threading, torch, gyrostat
from torch.utils.data import TensorDataset
from gyrostat.engine.checkpoint.writer import THREAD
job = gyrostat.init(seed=3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
job.track(model=model, optimizer=optimizer)
loader = job.dataloader(TensorDataset(torch.arange(96.0).view(24, 4)), batch_size=2, shuffle=True)
for epoch in job.epochs(int(sys.argv[1])):
    for step in job.steps(loader):
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join()  # so that a checkpoint can be taken at every boundary
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if len(sys.argv) > 2:
            job.save()
"""


def test_a_finished_job_can_be_made_longer(launch: Launch, tmp_path: Path) -> None:
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    whole = launch(SCRIPT, virtual_workers=2, args=["5"])
    assert launch(SCRIPT, virtual_workers=2, args=["2"], checkpoint=policy).steps == 12
    longer = launch(SCRIPT, placement=[1, 1], args=["5"], checkpoint=policy)
    assert longer.first_step == 12
    assert longer.digest == whole.digest


def test_save_and_every_and_keep(launch: Launch, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    launch(
        SCRIPT,
        placement=[1, 1],
        args=["2"],
        checkpoint=CheckpointPolicy(directory=str(directory), every=5, keep=2),
    )
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000010", "step-00000012"]
    asked = tmp_path / "asked"
    outcome = launch(
        SCRIPT,
        placement=[1, 1],
        args=["1", "save"],
        checkpoint=CheckpointPolicy(directory=str(asked), keep=9),
    )
    assert [record.step for record in outcome.checkpoints] == [1, 2, 3, 4, 5, 6]


def test_save_without_a_directory_says_what_to_do(launch: Launch) -> None:
    outcome = launch(SCRIPT, args=["1", "save"], check=False)
    assert outcome.failure is not None
    assert "--checkpoint-dir" in str(outcome.failure.traceback)


def test_starting_anew_sets_earlier_checkpoints_aside(launch: Launch, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    launch(SCRIPT, virtual_workers=2, args=["2"], checkpoint=CheckpointPolicy(directory=str(directory)))
    anew = CheckpointPolicy(directory=str(directory), resume=False)
    outcome = launch(SCRIPT, placement=[1, 1], args=["1"], checkpoint=anew)
    assert outcome.first_step == 0
    assert sorted(path.name for path in directory.iterdir()) == ["earlier-1", "step-00000006"]
    assert [path.name for path in (directory / "earlier-1").iterdir()] == ["step-00000012"]


def test_a_checkpoint_of_another_job_is_refused(launch: Launch, tmp_path: Path) -> None:
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    launch(SCRIPT, virtual_workers=2, args=["1"], checkpoint=policy)
    outcome = launch(SCRIPT, virtual_workers=3, args=["1"], checkpoint=policy, check=False)
    assert outcome.failure is not None
    assert "virtual_workers is 2 there and 3 here" in outcome.failure.summary
    threads = launch(SCRIPT, virtual_workers=2, args=["1"], checkpoint=policy, threads=2, check=False)
    assert threads.failure is not None
    assert "threads is '1' there and '2' here" in threads.failure.summary


def test_switches_and_evaluations_survive(launch: Launch, tmp_path: Path) -> None:
    """Stopped in the last epoch: what was frozen before stays frozen, and an evaluation before its steps is not run anew."""
    args = ["switches_in_mid_run"]
    whole = launch(ZOO, virtual_workers=3, reference=True, args=args)
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    stop = whole.steps // 3 * 2
    launch(ZOO, placement=[1, 2], args=args, checkpoint=policy, stop_after=stop)
    assert launch(ZOO, placement=[3], args=args, checkpoint=policy).digest == whole.digest


def test_a_script_that_ends_too_early_is_an_error(launch: Launch, tmp_path: Path) -> None:
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    launch(SCRIPT, virtual_workers=2, args=["3"], checkpoint=policy, stop_after=14)
    outcome = launch(SCRIPT, virtual_workers=2, args=["1"], checkpoint=policy, check=False)
    assert outcome.failure is not None
    assert "ended before the place where its checkpoint was taken" in str(outcome.failure.traceback)

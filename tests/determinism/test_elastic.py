"""A job that is resized while it trains ends with the bits of plain DDP on N fixed workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gyrostat.core.events import Event, EventKind
from gyrostat.core.job import CheckpointPolicy, ReductionOrder
from tests.conftest import Launch
from tests.determinism.batch_sources import CASES
from tests.determinism.test_batch_sources import FEEDS
from tests.determinism.test_digests import ZOO
from tests.determinism.test_resume import WIDE

FEATURES = ("loops", "random_dataset", "two_passes", "accumulation_not_broadcast", "static_graph", "closure")
WAYS = ("plain", "two_passes", "remembering", "several_loaders", "sampler_and_generator", "stream_per_rank")
"""What is run in CI; the others are in the full matrix."""


def chosen(names: Iterable[str], short: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in short else pytest.mark.full) for name in names]


EVERY_WAY = ((1, 3), (2, 4), (3, 1), (4, 2))
"""Out, out further, in, out again: a fence at every one of the first boundaries."""


@pytest.mark.parametrize("name", chosen(WIDE, FEATURES))
def test_resized_at_every_boundary(launch: Launch, name: str) -> None:
    reference = launch(ZOO, virtual_workers=4, reference=True, args=[name])
    elastic = launch(ZOO, virtual_workers=4, workers=2, args=[name], schedule=EVERY_WAY)
    assert elastic.digest == reference.digest
    assert elastic.losses == reference.losses
    assert (
        resizes(elastic.events)[: elastic.steps - 1]
        == [(1, 2, 3), (2, 3, 4), (3, 4, 1), (4, 1, 2)][: elastic.steps - 1]
    )


@pytest.mark.parametrize("name", chosen(CASES, WAYS))
def test_data_moves_with_its_virtual_worker(launch: Launch, name: str) -> None:
    """However data comes: data workers that are ahead, samplers, streams."""
    args = [name, "num_workers=2"]
    reference = launch(FEEDS, virtual_workers=3, reference=True, args=args)
    elastic = launch(FEEDS, virtual_workers=3, workers=1, args=args, schedule=((1, 3), (2, 2), (4, 3)))
    assert elastic.losses == reference.losses
    assert elastic.digest == reference.digest


def test_the_tree_is_resized_too(launch: Launch) -> None:
    fixed = launch(ZOO, virtual_workers=5, workers=5, args=["loops"], reduction=ReductionOrder.TREE)
    elastic = launch(
        ZOO,
        virtual_workers=5,
        workers=1,
        args=["loops"],
        reduction=ReductionOrder.TREE,
        schedule=((2, 4), (5, 3)),
    )
    assert elastic.digest == fixed.digest


def test_processes_that_stay_are_the_same_ones(launch: Launch) -> None:
    """Only newcomers are started, and only leavers end: three processes for 1, 3 and 2 workers."""
    outcome = launch(ZOO, virtual_workers=4, workers=1, args=["loops"], schedule=((2, 3), (4, 2)))
    assert outcome.exit_codes == (0, 0, 0)
    assert outcome.workers == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_checkpoints_of_a_job_that_is_resized(
    launch: Launch, tmp_path_factory: pytest.TempPathFactory, workers: int
) -> None:
    """Written by whoever is worker 0; a resumed run takes up its schedule where it was."""
    directory = tmp_path_factory.mktemp("checkpoints")
    reference = launch(ZOO, virtual_workers=4, reference=True, args=["loops"])
    policy = CheckpointPolicy(directory=str(directory), every=1)
    plan = ((2, 4), (3, 1), (6, 3))
    first = launch(
        ZOO, virtual_workers=4, workers=2, args=["loops"], checkpoint=policy, stop_after=4, schedule=plan
    )
    assert first.stopped
    rest = launch(ZOO, virtual_workers=4, workers=workers, args=["loops"], checkpoint=policy, schedule=plan)
    assert rest.first_step == 4
    assert rest.digest == reference.digest
    assert rest.workers == 3


def resizes(events: Sequence[Event]) -> list[tuple[int, int | None, int | None]]:
    return [
        (event.step, event.from_workers, event.to_workers)
        for event in events
        if event.kind is EventKind.RESIZE
    ]


MEDDLING = """
import torch
import gyrostat

job = gyrostat.init(seed=1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
data = job.dataloader([torch.full((4,), float(i)) for i in range(32)], batch_size=2)
for loop in range(2):
    for step in job.steps(data):
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
"""


PECULIAR = """
import torch
import gyrostat


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.norm(self.layer(x))

    def load_state_dict(self, state):  # wants all of it
        assert set(state) == set(self.state_dict())
        return super().load_state_dict(state)


class UpdateCounter:
    # State of its own that holds parameters of the model, too.
    def __init__(self, model):
        self.model, self.updates = model, 0

    def state_dict(self):
        return {"weight": self.model.layer.weight, "updates": self.updates}

    def load_state_dict(self, state):
        assert set(state) == {"weight", "updates"}
        self.updates = state["updates"]
        self.model.layer.weight.data.copy_(state["weight"])


job = gyrostat.init(seed=1)
model = Net()
counter, average = UpdateCounter(model), torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job.track(model=model, average=average, optimizer=optimizer, counter=counter)
data = job.dataloader([torch.full((4,), float(i)) for i in range(64)], batch_size=2, shuffle=True)
for step in job.steps(data):
    for x in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    counter.updates += 1
"""


def test_what_optimizers_do_not_own_comes_at_the_fence(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "peculiar.py"
    script.write_text(PECULIAR)
    fixed = launch(script, virtual_workers=4, workers=4)
    elastic = launch(script, virtual_workers=4, workers=1, schedule=((2, 2), (5, 3)))
    assert elastic.digest == fixed.digest
    assert [e.all_state_moved for e in elastic.events if e.kind is EventKind.RESIZE] == [None, None]


def test_newcomers_follow_the_others_or_say_why_not(launch: Launch, tmp_path: Path) -> None:
    """A script that changes parameters between its loops does so on a newcomer too, when that comes past: it is found out."""
    script = tmp_path / "meddling.py"
    script.write_text(MEDDLING)
    fixed = launch(script, virtual_workers=4, workers=2)
    elastic = launch(script, virtual_workers=4, workers=1, schedule=((2, 2), (5, 3)))
    assert elastic.digest == fixed.digest
    first, second = (event.all_state_moved for event in elastic.events if event.kind is EventKind.RESIZE)
    assert first is None
    assert second is not None
    assert "checksums differ" in second

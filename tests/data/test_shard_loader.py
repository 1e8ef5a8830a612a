"""`job.shards`: virtual workers pull shards; counted in the model, over placements, checkpoints and kills."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from gyrostat.core.errors import Misuse, ScriptFailed, UsageError
from gyrostat.core.job import CheckpointPolicy, RecoveryMode
from gyrostat.data.shard_loader import ShardLoader, make_shard_loader
from tests.conftest import Launch


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def loader(
    length: int, n: int, *, batch_size: Any = 3, shard_size: int = 7, shuffle: bool = True, **others: Any
) -> ShardLoader:
    return make_shard_loader(
        Numbers(length),
        batch_size=batch_size,
        shard_size=shard_size,
        virtual_workers=n,
        seed=5,
        shuffle=shuffle,
        num_workers=0,
        drop_last=False,
        pin_memory=False,
        collate_fn=None,
        others=others,
    )


def run_epoch(shards: ShardLoader, n: int, epoch: int, *, ahead: int = 0) -> list[list[list[int]]]:
    """Batch by batch what each virtual worker sees, asked for `ahead` batches early, as prefetching would."""
    order = shards.order(seed=5, epoch=epoch)
    seen = []
    for batch in range(order.batches):
        for early in range(batch, min(batch + ahead + 1, order.batches)):
            order.indices(n - 1, early)
        seen.append([order.indices(rank, batch) for rank in range(n)])
        shards.queues.done(batch + 1)
    return seen


@given(
    length=st.integers(8, 120),
    n=st.integers(1, 5),
    batch_size=st.integers(2, 6),
    shard_size=st.integers(1, 30),
    shuffle=st.booleans(),
    ahead=st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_once_per_epoch_however_far_ahead_it_is_planned(
    length: int, n: int, batch_size: int, shard_size: int, shuffle: bool, ahead: int
) -> None:
    try:
        made = [
            loader(length, n, batch_size=batch_size, shard_size=shard_size, shuffle=shuffle) for _ in range(2)
        ]
        made[0].order(seed=5, epoch=0)
    except Misuse:
        return  # too few samples for the virtual workers: an error that says so
    for epoch in range(2):
        seen = run_epoch(made[0], n, epoch)
        assert sorted(i for batch in seen for part in batch for i in part) == list(range(length))
        assert run_epoch(made[1], n, epoch, ahead=ahead) == seen
        assert made[0].queues.state_dict() == made[1].queues.state_dict()


@given(stop=st.integers(0, 12), ahead=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(stop: int, ahead: int) -> None:
    whole = loader(100, 3)
    expected = run_epoch(whole, 3, 0) + run_epoch(whole, 3, 1)
    first = loader(100, 3)
    order = first.order(seed=5, epoch=0)
    for batch in range(stop):
        for early in range(batch, min(batch + ahead + 1, order.batches)):
            order.indices(0, early)
        first.queues.done(batch + 1)
    second = loader(100, 3)
    resumed = second.order(seed=5, epoch=0)  # made before the state is loaded, as in a resumed job
    second.queues.load_state_dict(first.queues.state_dict())
    seen = []
    for batch in range(stop, resumed.batches):
        seen.append([resumed.indices(rank, batch) for rank in range(3)])
        second.queues.done(batch + 1)
    assert seen + run_epoch(second, 3, 1) == expected[stop:]


def leave_an_epoch(*, ahead: int) -> tuple[Any, Any]:
    """Four steps of an epoch, planned further than that, and all of the next one."""
    shards = loader(100, 3)
    order = shards.order(seed=5, epoch=0)
    for batch in range(4):
        order.indices(0, batch)
        order.indices(0, batch + ahead)
        shards.queues.done(batch + 1)
    seen = run_epoch(shards, 3, 1)
    assert sorted(i for batch in seen for part in batch for i in part) == list(range(100))
    return seen, shards.queues.state_dict()


def test_a_loop_that_was_left_drops_its_rest_and_what_was_planned_of_it() -> None:
    assert leave_an_epoch(ahead=3) == leave_an_epoch(ahead=0)


def test_samples_are_shuffled_within_shards_too() -> None:
    [first, *_] = run_epoch(loader(1000, 1, batch_size=50, shard_size=100), 1, 0)
    shard = first[0][0] // 100
    assert {index // 100 for index in first[0]} == {shard}
    assert first[0] != sorted(first[0])


def test_shards_go_through_as_they_lie_without_shuffling() -> None:
    seen = run_epoch(loader(12, 1, batch_size=4, shard_size=6, shuffle=False), 1, 0)
    assert seen == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]


def test_another_script_is_noticed() -> None:
    shards = loader(100, 3)
    order = shards.order(seed=5, epoch=0)
    with pytest.raises(Misuse, match="step 4 of epoch 0"):
        order.indices(0, 4)


def test_bad_input_is_named() -> None:
    with pytest.raises(UsageError, match="shard_size must be"):
        loader(10, 1, shard_size=0)
    with pytest.raises(UsageError, match="batch_size must be"):
        loader(10, 1, batch_size=0)
    with pytest.raises(UsageError, match="shuffle='bijection'"):
        loader(10, 1, shuffle="bijection")  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="so batch_sampler cannot be used"):
        loader(10, 1, batch_sampler=[[0], [1]])


SCRIPT = """
import os, signal
import gyrostat, torch
from torch.utils.data import Dataset

class Rows(Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return index, torch.full((3,), index / 50.0)

job = gyrostat.init(seed=5)
model = torch.nn.Linear(3, 1)
model.register_buffer("last", torch.zeros(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
train = job.shards(Rows(), batch_size=3, shard_size=8)
job.track(model=model, optimizer=optimizer)
job.state["seen"] = [0] * 50      # part of the model's state: how often each sample went into it
for epoch in job.epochs(2):
    for step in job.steps(train):
        here = []
        for index, x in step:
            loss = model(x).square().mean()
            step.backward(loss)
            here.append(job.mean(torch.zeros(50).index_fill_(0, index, 1.0) * (1.0 / len(index))))
        optimizer.step()
        optimizer.zero_grad()
        for sample in torch.nonzero(here[0].value).flatten().tolist():
            job.state["seen"][sample] += 1
        if os.environ.get("KILL_AT") == str(job.step) and job.is_main:
            os.kill(os.getpid(), signal.SIGKILL)
    assert job.state["seen"] == [epoch + 1] * 50, job.state["seen"]
"""


def test_the_placement_makes_no_difference(launch: Launch) -> None:
    one = launch(SCRIPT, virtual_workers=4)
    assert one.steps == 2 * 5
    assert one.samples == 2 * 50
    assert launch(SCRIPT, placement=[1, 3]).digest == one.digest


def test_data_workers_run_ahead_of_what_is_saved(launch: Launch) -> None:
    script = SCRIPT.replace("shard_size=8", "shard_size=8, num_workers=2").replace(
        "torch.full((3,), index / 50.0)", "torch.full((3,), index / 50.0) + 0.1 * torch.rand(3)"
    )
    expected = launch(script, virtual_workers=4).digest
    policy = CheckpointPolicy(directory=str(launch.directory / "ahead"), every=2)
    with pytest.raises(ScriptFailed):
        launch(
            script,
            placement=[2, 2],
            checkpoint=policy,
            recovery=RecoveryMode.CHECKPOINT,
            env={"KILL_AT": "7"},
        )
    assert launch(script, placement=[1, 3], checkpoint=policy).digest == expected


def test_one_map_style_dataset_is_needed(launch: Launch) -> None:
    script = SCRIPT.replace("job.shards(Rows()", "job.shards(lambda rank: Rows()")
    with pytest.raises(ScriptFailed, match="needs one dataset with __len__"):
        launch(script, virtual_workers=2)


def test_ddp_given_the_same_samples_has_the_same_bits(launch: Launch) -> None:
    even = SCRIPT.replace("50", "48")
    assert (
        launch(even, placement=[1, 2], virtual_workers=3).digest
        == launch(even, virtual_workers=3, reference=True).digest
    )
    with pytest.raises(ScriptFailed, match="shards whose last step is not full"):
        launch(SCRIPT, virtual_workers=3, reference=True)


@pytest.mark.parametrize("kill_at", [1, 4, 6])
def test_killed_and_resumed_elsewhere_every_sample_counts_once(launch: Launch, kill_at: int) -> None:
    expected = launch(SCRIPT, virtual_workers=4).digest
    policy = CheckpointPolicy(directory=str(launch.directory / f"kill{kill_at}"), every=2)
    with pytest.raises(ScriptFailed):
        launch(
            SCRIPT,
            placement=[2, 2],
            checkpoint=policy,
            recovery=RecoveryMode.CHECKPOINT,
            env={"KILL_AT": str(kill_at)},
        )
    resumed = launch(SCRIPT, placement=[1, 1, 2], checkpoint=policy)
    assert resumed.digest == expected


def test_accumulation_is_refused(launch: Launch) -> None:
    with pytest.raises(ScriptFailed, match="equal batch sizes; this loader has shards"):
        launch(SCRIPT.replace("job.steps(train)", "job.steps(train, accumulate=2)"), virtual_workers=2)

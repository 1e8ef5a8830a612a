"""A computed order holds every sample exactly once, depends on everything it is keyed by, and looks shuffled."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from gyrostat.core.errors import UsageError
from gyrostat.data.bijection import Bijection
from gyrostat.data.options import make_loader
from gyrostat.data.order import EvenOrder, UnevenOrder
from tests.conftest import Launch


@given(length=st.integers(0, 20_000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=80, deadline=None)
def test_every_element_exactly_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(Bijection(length, seed, epoch).take(range(length))) == list(range(length))


@given(
    length=st.integers(1, 30_000),
    start=st.integers(0, 30_000),
    step=st.integers(1, 9_000),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_the_three_ways_to_ask_agree(length: int, start: int, step: int, data: st.DataObject) -> None:
    order = Bijection(length, 1)
    positions = range(min(start, length), length, step)
    taken = order.take(positions)
    assert taken == order.at(np.array(positions, dtype=np.int64)).tolist()
    if positions:
        place = data.draw(st.integers(0, len(positions) - 1))
        assert order[positions[place]] == taken[place]


@pytest.mark.parametrize("length", [10**9, 2**40 + 1, 2**62])
def test_a_huge_order_neither_leaves_nor_repeats(length: int) -> None:
    order = Bijection(length, 7, 3)
    places = np.concatenate([np.arange(20_000), np.arange(length - 20_000, length)])
    elements = order.at(places)
    assert len(set(elements.tolist())) == len(places)
    assert elements.min() >= 0
    assert elements.max() < length
    assert order.take(range(length - 3, length)) == elements[-3:].tolist()


def test_it_is_the_same_on_every_machine_and_for_ever() -> None:
    assert Bijection(10, 7, 0).take(range(10)) == [4, 7, 2, 5, 9, 3, 8, 6, 1, 0]
    drawn = Bijection(10**9, 7, 3).at(np.arange(1000)).astype("<i8").tobytes()
    assert hashlib.sha256(drawn).hexdigest()[:16] == "dbc8ba65266f92a7"


def test_seed_epoch_and_length_all_change_it() -> None:
    orders = [
        Bijection(length, seed, epoch).take(range(1000))
        for length, seed, epoch in [(5000, 1, 2), (5000, 2, 1), (5000, 1, 3), (5000, 12, 0), (5001, 1, 2)]
    ]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


def test_it_looks_shuffled() -> None:
    order = Bijection(10**6, 5, 0).at(np.arange(10**6))
    for other in (np.arange(10**6), np.roll(order, 1), Bijection(10**6, 5, 1).at(np.arange(10**6))):
        assert abs(np.corrcoef(order, other)[0, 1]) < 0.005  # five times what chance gives
    # Of neighbours in a random order, one pair per million is also next to each other in the dataset, in either direction.
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 15


def test_small_orders_are_shuffled_evenly() -> None:
    seeds, length = 1500, 10
    seen = Counter(
        (place, element)
        for seed in range(seeds)
        for place, element in enumerate(Bijection(length, seed).take(range(length)))
    )
    expected = seeds / length
    chi_square = sum((seen[i, j] - expected) ** 2 / expected for i in range(length) for j in range(length))
    assert chi_square < 145  # 81 degrees of freedom: chance exceeds it once in 10⁵


@pytest.mark.parametrize("length", [-1, 2**62 + 1])
def test_an_impossible_length_raises(length: int) -> None:
    with pytest.raises(UsageError, match=str(length)):
        Bijection(length)


def test_a_position_outside_is_an_error() -> None:
    with pytest.raises(IndexError, match="position 5"):
        Bijection(5)[5]


@given(
    length=st.integers(1, 300),
    n=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    epoch=st.integers(0, 3),
    pad=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_an_epoch_has_every_sample_once_and_only_padding_twice(
    length: int, n: int, batch_size: int, epoch: int, pad: bool
) -> None:
    order = EvenOrder(
        length=length,
        virtual_workers=n,
        batch_size=batch_size,
        seed=3,
        epoch=epoch,
        shuffle="bijection",
        pad=pad,
    )
    seen = Counter(
        i for rank in range(n) for batch in range(order.batches) for i in order.indices(rank, batch)
    )
    total = -(-length // n) * n if pad else length // n * n
    assert seen.total() == total
    if pad:
        assert set(seen) == set(range(length))
        assert max(seen.values()) <= 1 + -(-(total - length) // length)
    else:
        assert set(seen.values()) <= {1}


@given(length=st.integers(20, 300), sizes=st.lists(st.integers(2, 6), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_uneven_batches_in_a_computed_order_have_every_sample_once(length: int, sizes: list[int]) -> None:
    order = UnevenOrder(length=length, sizes=tuple(sizes), seed=3, epoch=1, shuffle="bijection")
    seen = [
        i for batch in range(order.batches) for rank in range(len(sizes)) for i in order.indices(rank, batch)
    ]
    assert sorted(seen) == list(range(length))


class Billion(Dataset[int]):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("batch_size", [32, [31, 33]])
def test_a_billion_samples_are_loaded_from_any_place(batch_size: Any) -> None:
    loader = make_loader(
        Billion(),
        batch_size=batch_size,
        virtual_workers=2,
        shuffle="bijection",
        num_workers=0,
        drop_last=False,
        pad=True,
        pin_memory=False,
        collate_fn=None,
        others={},
    )
    order = loader.order(seed=1, epoch=0)
    assert len(loader) == 15_625_000
    last = loader.fetch(order.indices(1, len(loader) - 1))
    assert len(set(last.tolist())) == (32 if batch_size == 32 else 33)


def test_an_unknown_shuffle_is_named() -> None:
    with pytest.raises(UsageError, match="shuffle='random'"):
        make_loader(
            Billion(),
            batch_size=1,
            virtual_workers=1,
            shuffle="random",  # type: ignore[arg-type]
            num_workers=0,
            drop_last=False,
            pad=True,
            pin_memory=False,
            collate_fn=None,
            others={},
        )


SCRIPT = """
import gyrostat, torch
from torch.utils.data import TensorDataset

job = gyrostat.init(seed=5)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(26, 4, generator=torch.Generator().manual_seed(1))
train = job.dataloader(TensorDataset(x), batch_size=3, shuffle="bijection")
job.track(model=model, optimizer=optimizer)
for _ in job.epochs(2):
    for step in job.steps(train):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_job_in_computed_order_has_the_bits_of_ddp_given_that_order(launch: Launch) -> None:
    expected = launch(SCRIPT, virtual_workers=3, reference=True).digest
    assert launch(SCRIPT, placement=[2, 1]).digest == expected
    assert launch(SCRIPT.replace('"bijection"', "True"), virtual_workers=3, reference=True).digest != expected

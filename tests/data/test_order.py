"""Our order is DistributedSampler's, for every combination of its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.options import make_loader
from gyrostat.data.order import EvenOrder


@given(
    length=st.integers(1, 200),
    n=st.integers(1, 9),
    batch_size=st.integers(1, 17),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    pad=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_equals_distributed_sampler(
    length: int, n: int, batch_size: int, seed: int, epoch: int, shuffle: bool, pad: bool, drop_last: bool
) -> None:
    order = EvenOrder(
        length=length,
        virtual_workers=n,
        batch_size=batch_size,
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
        drop_last=drop_last,
        pad=pad,
    )
    dataset = TensorDataset(torch.zeros(length))
    for rank in range(n):
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=n, rank=rank, shuffle=shuffle, seed=seed, drop_last=not pad
        )
        sampler.set_epoch(epoch)
        expected = list(BatchSampler(sampler, batch_size, drop_last))
        assert [order.indices(rank, batch) for batch in range(order.batches)] == expected


def loader(length: int = 10, **options: Any) -> OrderedLoader:
    settings: dict[str, Any] = {
        "batch_size": 2,
        "virtual_workers": 3,
        "shuffle": False,
        "num_workers": 0,
        "drop_last": False,
        "pad": True,
        "pin_memory": False,
        "collate_fn": None,
        "others": {},
    }
    return make_loader(TensorDataset(torch.arange(length)), **(settings | options))


def test_fetches_what_dataloader_fetches() -> None:
    class Batched(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(self[i][0] * 10,) for i in indices]

    for dataset in (TensorDataset(torch.arange(10)), Batched(torch.arange(10))):
        ours = OrderedLoader(dataset=dataset, batch_size=4).fetch([3, 1, 2])
        [theirs] = list(DataLoader(dataset, batch_sampler=[[3, 1, 2]]))
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True])
def test_a_wrong_batch_size_is_named(batch_size: Any) -> None:
    with pytest.raises(UsageError, match="batch_size must be"):
        loader(batch_size=batch_size)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(UsageError, match="'shufle'"):
        loader(others={"shufle": True})


@pytest.mark.parametrize(
    ("length", "options"), [(2, {"pad": False}), (9, {"batch_size": 4, "drop_last": True})]
)
def test_a_virtual_worker_without_data_is_an_error(length: int, options: dict[str, Any]) -> None:
    with pytest.raises(Misuse, match="left without data"):
        loader(length, **options).order(seed=0, epoch=0)


@pytest.mark.parametrize(("length", "drop_last"), [(10, False), (10, True), (12, False), (13, True)])
def test_length_is_that_of_a_dataloader(length: int, drop_last: bool) -> None:
    dataset = TensorDataset(torch.arange(length))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=3, rank=0)
    assert len(loader(length, drop_last=drop_last)) == len(
        DataLoader(dataset, 2, sampler=sampler, drop_last=drop_last)
    )

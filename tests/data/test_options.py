"""What `job.dataloader` takes, and what it refuses with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from gyrostat.core.errors import NotYet, Refused, UsageError
from gyrostat.data.evaluation import check_evaluable
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.options import make_loader


class Stream(IterableDataset[int]):
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def make(dataset: Any = None, **options: Any) -> OrderedLoader:
    settings: dict[str, Any] = {
        "batch_size": 1,
        "shuffle": False,
        "num_workers": 0,
        "drop_last": False,
        "pad": True,
        "pin_memory": False,
        "collate_fn": None,
    }
    named = settings | {name: options.pop(name) for name in tuple(options) if name in settings}
    data = TensorDataset(torch.arange(10)) if dataset is None else dataset
    return make_loader(data, virtual_workers=2, others=options, ranks=(0, 1), **named)


def test_in_order_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="in the order in which data workers happen to finish"):
        make(num_workers=2, in_order=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": -1}, "num_workers must be"),
        ({"num_workers": 1.5}, "num_workers must be"),
        ({"prefetch_factor": 2}, "about data workers"),
        ({"persistent_workers": True}, "about data workers"),
        ({"timeout": 3}, "about data workers"),
        ({"multiprocessing_context": "fork"}, "about data workers"),
        ({"num_workers": 1, "timeout": -1}, "timeout must be"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor must be"),
        ({"num_workers": 1, "multiprocessing_context": "thread"}, "multiprocessing_context must be one of"),
        ({"sampler": [0], "shuffle": True}, "exclude each other"),
        ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler excludes"),
        ({"batch_sampler": [[0]], "drop_last": True}, "batch_sampler excludes"),
        ({"sampler": 3}, "sampler must be an iterable"),
        ({"sampler": iter([1])}, "used up only once"),
        ({"generator": 3}, "generator must be"),
        ({"batch_size": None, "drop_last": True}, "drop_last has no meaning"),
        ({"batch_size": [1, 2], "sampler": [0]}, "a list of batch sizes goes with"),
        ({"shufle": True}, "no option 'shufle'"),
        ({"dataset": Stream(), "shuffle": True}, "decides its own order"),
        ({"dataset": Stream(), "sampler": [0]}, "decides its own order"),
        ({"dataset": 3}, "int is not a dataset"),
        ({"dataset": lambda rank: [rank], "batch_size": [1, 2]}, "each has a dataset of its own"),
        ({"dataset": lambda rank: [rank], "shuffle": "bijection"}, "each has a dataset of its own"),
        ({"dataset": lambda rank: [rank], "pad": False}, "each has a dataset of its own"),
    ],
)
def test_what_makes_no_sense_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(**options)


def test_datapipes_are_refused() -> None:
    with pytest.raises(NotYet, match="DataPipe"):
        make(IterableWrapper([1]))


@pytest.mark.parametrize("maker", [Stream, lambda rank: Stream(rank)])
def test_a_callable_makes_the_dataset_of_a_rank(maker: Any) -> None:
    loader = make(maker)
    assert loader.iterable
    assert [loader.dataset_of(rank).rank for rank in (0, 1)] == [0, 1]
    with pytest.raises(UsageError, match="made per rank"):
        check_evaluable(loader)


def test_each_rank_is_made_from_the_same_streams() -> None:
    torch.manual_seed(3)
    loader = make(sampler=lambda rank: torch.randperm(10).tolist())
    after = torch.rand(())
    torch.manual_seed(3)
    once = torch.randperm(10).tolist()
    assert loader.sampler_of(0) == loader.sampler_of(1) == once
    assert torch.equal(after, torch.rand(()))


def test_an_iterable_dataset_that_knows_no_ranks_is_shared_out() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    loader = make(Numbers())
    assert [list(loader.dataset_of(rank)) for rank in (0, 1)] == [[0, 2, 4, 6], [1, 3, 5]]
    with pytest.raises(UsageError, match="iterable"):
        check_evaluable(loader)


def test_a_shared_out_dataset_goes_on_where_it_was() -> None:
    class Numbers(IterableDataset[int]):
        next = 0

        def __iter__(self) -> Iterator[int]:
            while self.next < 9:
                self.next += 1
                yield self.next - 1
            self.next = 0

        def state_dict(self) -> dict[str, int]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = state["next"]

    first, second = make(Numbers()).dataset_of(1), make(Numbers()).dataset_of(1)
    iterator = iter(first)
    assert [next(iterator), next(iterator)] == [1, 3]
    second.load_state_dict(first.state_dict())
    assert list(second) == list(iterator) == [5, 7]
    assert list(second) == list(first) == [1, 3, 5, 7]


def test_lengths() -> None:
    assert len(make(batch_size=2, sampler=range(7))) == 4
    assert len(make(batch_sampler=[[0], [1, 2]])) == 2
    assert len(make(batch_size=None)) == 5
    with pytest.raises(TypeError, match="has no length"):
        len(make(Stream()))


def test_the_order_of_a_dataset_without_a_length_needs_a_sampler() -> None:
    class Unsized(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    assert len(make(Unsized(), batch_size=2, sampler=range(7))) == 4
    with pytest.raises(UsageError, match="Unsized has no __len__"):
        make(Unsized()).order(seed=0, epoch=0)

"""Replicas have independent states, share large parts, and their state can be loaded into another replica."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

from gyrostat.data.dataset_replica import DatasetReplica
from gyrostat.engine.state import statetree


class Jitter:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)


class Holding(Dataset[Any]):
    """Generators of every kind, counters, a list that grows, a tensor changed in place, one made when first needed."""

    def __init__(self) -> None:
        self.big = torch.zeros(10_000)
        self.names = [str(number) for number in range(10_000)]
        self.count = 0
        self.torch = torch.Generator().manual_seed(1)
        self.python = random.Random(2)
        self.legacy = np.random.RandomState(3)
        self.parts: list[Any] = [Jitter(), nn.Dropout(), Jitter()]
        self.lazy: np.random.Generator | None = None
        self.small = torch.zeros(3)
        self.log: list[int] = []
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> tuple[float, ...]:
        self.count += 1
        self.small += 1
        self.log.append(index)
        if self.lazy is None:
            self.lazy = np.random.default_rng(5)
        return (
            float(self.count),
            float(torch.rand((), generator=self.torch)),
            self.python.gauss(0, 1),
            float(self.legacy.normal()),
            float(self.parts[0].rng.normal()),
            float(self.lazy.random()),
            float(self.small.sum()),
            float(len(self.log)),
        )

    def collate(self, samples: Any) -> Any:
        self.count += 100
        return samples


def draw(replica: DatasetReplica, count: int) -> list[Any]:
    return [replica.parts[0][index] for index in range(count)]


def carried(held: Any) -> Any:
    """As a checkpoint, or the way to another worker, carries it."""
    return statetree.decode(statetree.encode(held))


def test_large_things_are_shared_and_small_ones_are_not() -> None:
    original = Holding()
    replica = DatasetReplica(original).parts[0]
    assert replica is not original
    assert replica.big is original.big
    assert replica.names is original.names
    assert replica.lock is original.lock
    assert replica.torch is not original.torch
    assert replica.parts[0] is not original.parts[0]
    replica.small += 1
    assert original.small.tolist() == [0, 0, 0]


def test_the_state_is_none_while_nothing_changes() -> None:
    assert DatasetReplica(Holding(), print, None).state() is None


@given(first=st.integers(0, 5), second=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_what_is_held_goes_on_elsewhere(first: int, second: int) -> None:
    one, other, untouched = DatasetReplica(Holding()), DatasetReplica(Holding()), DatasetReplica(Holding())
    draw(one, first)
    held = carried(one.state())
    assert (held is None) == (first == 0)
    expected = draw(one, second)
    draw(other, 3)
    other.load_state(held)
    assert draw(other, second) == expected
    other.load_state(None)
    assert draw(other, 4) == draw(untouched, 4)


def test_a_bound_method_belongs_to_the_replica() -> None:
    original = Holding()
    replica = DatasetReplica(original, original.collate)
    replica.parts[1]([1])
    assert replica.parts[0].count == 100
    assert original.count == 0
    held = carried(replica.state())
    other = DatasetReplica(original, original.collate)
    other.load_state(held)
    assert other.parts[0].count == 100


def test_attributes_that_come_and_go() -> None:
    class Plain:
        def __init__(self) -> None:
            self.here: Any = 1

    one, other = DatasetReplica(Plain()), DatasetReplica(Plain())
    del one.parts[0].here
    one.parts[0].there = {"a": [1, 2]}
    other.load_state(carried(one.state()))
    assert vars(other.parts[0]) == {"there": {"a": [1, 2]}}
    other.load_state(None)
    assert vars(other.parts[0]) == {"here": 1}


def test_a_value_that_comes_back_is_seen_to_have_changed() -> None:
    class Counter:
        value = 0.5

    replica = DatasetReplica(Counter())
    replica.parts[0].value = 1.5
    assert replica.state() is not None
    for value in (2.5, 3.5, 4.5, 5.5):
        replica.parts[0].value = value
        held = replica.state()
        assert held is not None
        assert held["changes"][0][1] == ["plain", value]


def test_state_dict_is_preferred() -> None:
    class Stateful(Holding):
        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    one, other = DatasetReplica(Stateful()), DatasetReplica(Stateful())
    draw(one, 2)
    assert one.state() == {"state_dicts": {0: {"count": 2}}, "changes": []}
    other.load_state(carried(one.state()))
    assert other.parts[0].count == 2


class OwnWay:
    def __init__(self) -> None:
        self.closed = False

    def __reduce__(self) -> str:
        raise TypeError("cannot be copied")


class Closing:
    def __init__(self) -> None:
        self.file = 3

    def __del__(self) -> None:
        pass


class Slotted:
    __slots__ = ("__dict__", "hidden")

    def __init__(self) -> None:
        self.hidden = 1


@pytest.mark.parametrize("kind", [OwnWay, Closing, Slotted, threading.Event])
def test_what_cannot_be_copied_safely_is_shared(kind: Any) -> None:
    class Holder:
        def __init__(self) -> None:
            self.thing = kind()

    original = Holder()
    assert DatasetReplica(original).parts[0].thing is original.thing


def test_a_kept_thing_is_not_copied() -> None:
    generator = torch.Generator()
    original = Holding()
    original.torch = generator
    assert DatasetReplica(original, keep=(generator,)).parts[0].torch is generator


def test_what_the_script_changes_later_is_followed_and_the_rest_kept() -> None:
    original = Holding()
    replica = DatasetReplica(original)
    draw(replica, 2)
    original.small += 5
    original.names = ["other"] * 10_000
    original.parts[1] = nn.Dropout(0.9)
    original.parts[2].extra = {"strength": 2}
    replica.follow_originals()
    followed = replica.parts[0]
    assert followed.count == 2
    assert followed.small.tolist() == [5, 5, 5]
    assert followed.names is original.names
    assert followed.parts[1].p == 0.9
    assert followed.parts[2].extra == {"strength": 2}
    assert followed.parts[2].extra is not original.parts[2].extra
    held = carried(replica.state())
    other = DatasetReplica(original)
    other.load_state(held)
    assert draw(other, 3) == draw(replica, 3)


class Buffering(Dataset[Any]):
    """Containers of tensors and arrays that grow, shrink and are bound anew; the other collections of the library."""

    def __init__(self) -> None:
        self.count = 0
        self.list: list[Any] = []
        self.dict: dict[Any, Any] = {}
        self.nested: dict[Any, Any] = {"a": [np.zeros(2)], "steps": [0.0, 0.0]}
        self.window: deque[Any] = deque([0, 0], maxlen=3)
        self.groups: defaultdict[int, list[Any]] = defaultdict(list)
        self.seen: Counter[int] = Counter()
        self.order: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, index: int) -> str:
        self.count += 1
        self.list.append(torch.full((2,), float(index)))
        self.dict[self.count] = torch.full((1,), float(index))
        self.nested["a"].append(np.full(2, index))
        self.nested["steps"][self.count % 2] = torch.full((2,), float(index))
        self.window.append(index if self.count % 2 else torch.ones(1))
        self.groups[index % 3].append(index)
        self.seen[index] += 1
        self.order[index] = np.arange(index)
        self.order.move_to_end(next(iter(self.order)))
        if len(self.list) > 3:
            self.list.pop(self.count % 3)
            self.dict.pop(self.count - 2, None)
            self.nested["a"].pop(0)
        if self.count % 5 == 0:
            self.list = []
            self.groups.clear()
        return repr(vars(self))


@pytest.mark.parametrize("before", range(0, 12, 2))
@pytest.mark.parametrize("elsewhere", [0, 1, 3, 4, 7])
def test_containers_that_grow_and_shrink(before: int, elsewhere: int) -> None:
    original = Buffering()
    one, other = DatasetReplica(original), DatasetReplica(original)
    draw(one, before)
    draw(other, elsewhere)
    other.load_state(carried(one.state()))
    assert draw(other, 4) == draw(one, 4)
    assert original.count == 0
    assert list(original.window) == [0, 0]
    assert not original.groups

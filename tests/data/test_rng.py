from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.data.rng import RngState, Streams, seed_all
from gyrostat.engine.state import statetree

NUMPY: Any = np.random  # its stubs leave some functions out
DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.randn(1).item(),
    "numpy": lambda: float(np.random.random()),
    "normal": lambda: float(np.random.normal()),  # leaves a cached second variate behind
    "python": lambda: random.random(),
    "gauss": lambda: random.gauss(0, 1),
    "nothing": lambda: 0.0,
}


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from(sorted(DRAWS)), max_size=4)), max_size=12
    )
)
@settings(max_examples=60, deadline=None)
def test_streams_that_take_turns_give_what_they_give_alone(turns: list[tuple[int, list[str]]]) -> None:
    alone: dict[int, list[float]] = {}
    for owner in range(3):
        seed_all(40 + owner)
        alone[owner] = [DRAWS[name]() for who, names in turns if who == owner for name in names]

    streams = Streams()
    states: dict[int, RngState] = {}
    for owner in range(3):
        seed_all(40 + owner)
        states[owner] = streams.save()
    outside = streams.save()
    drawn: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for owner, names in turns:
        before = streams.exchange(states[owner])
        drawn[owner] += [DRAWS[name]() for name in names]
        states[owner] = streams.exchange(before)
    assert drawn == alone
    assert same(streams.save(), outside)


def same(a: RngState, b: RngState) -> bool:
    return torch.equal(a.torch, b.torch) and a.numpy == b.numpy and a.python == b.python


def test_a_state_travels_as_a_tree() -> None:
    seed_all(5)
    np.random.normal()
    state = Streams().save()
    assert same(RngState.from_tree(statetree.decode(statetree.encode(state.to_tree()))), state)


def test_an_unused_numpy_stream_is_not_copied() -> None:
    streams = Streams()
    seed_all(1)
    mine = streams.save()
    streams.exchange(mine)
    assert streams.exchange(mine).numpy is mine.numpy


def test_another_bit_generator_of_numpy_is_noticed() -> None:
    streams = Streams()
    before: Any = NUMPY.get_bit_generator()
    seed_all(1)
    state = streams.save()
    try:
        NUMPY.set_bit_generator(np.random.MT19937(9))
        streams.exchange(state)
        assert np.random.random() == pytest.approx(np.random.RandomState(1).random_sample(), abs=0)
    finally:
        NUMPY.set_bit_generator(before)

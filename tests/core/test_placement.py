from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import Placement, Segment, apportion, apportion_by_speed


def test_even_gives_the_first_workers_one_more() -> None:
    placement = Placement.even(5, 3)
    assert placement.segments == (Segment(0, 0, 2), Segment(1, 2, 4), Segment(2, 4, 5))
    assert placement.virtual_workers == 5
    assert placement.workers == 3
    assert placement.held_by(1) == (2, 3)
    assert [placement.owner(rank) for rank in range(5)] == [0, 0, 1, 1, 2]


def test_a_worker_may_hold_several_segments() -> None:
    placement = Placement((Segment(0, 0, 1), Segment(1, 1, 2), Segment(0, 2, 4)))
    assert placement.held_by(0) == (0, 2, 3)
    assert placement.workers == 2


@pytest.mark.parametrize(
    ("virtual_workers", "workers", "says"),
    [(2, 3, "use --workers 2 or fewer"), (0, 1, "at least one"), (1, 0, "at least one")],
)
def test_impossible_numbers_are_refused(virtual_workers: int, workers: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Placement.even(virtual_workers, workers)


@pytest.mark.parametrize("counts", [[], [0], [2, 0, 1]])
def test_a_worker_without_virtual_workers_is_refused(counts: list[int]) -> None:
    with pytest.raises(UsageError, match="at least one virtual worker"):
        Placement.from_counts(counts)


@pytest.mark.parametrize(
    "segments", [(Segment(0, 1, 2),), (Segment(0, 0, 1), Segment(1, 2, 3)), (Segment(1, 0, 2),)]
)
def test_gaps_are_refused(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(UsageError):
        Placement(segments)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(0, 200))
def test_apportioning_is_fair_and_complete(weights: list[float], extra: int) -> None:
    total = len(weights) + extra
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert min(shares) >= 1
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - 1 - extra * weight / sum(weights)) < 1 + 1e-9


def test_too_little_to_apportion() -> None:
    with pytest.raises(UsageError, match="3 shares"):
        apportion(2, [1, 1, 1])


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(0, 6))
def test_pieces_by_speed_are_done_soonest(seconds: list[float], more: int) -> None:
    """No other split in which everybody has one is done earlier: all are tried."""
    total = len(seconds) + more
    shares = apportion_by_speed(total, seconds)
    assert sum(shares) == total
    assert min(shares) >= 1

    def done(counts: Sequence[int]) -> float:
        return max(count * time for count, time in zip(counts, seconds, strict=True))

    others = itertools.product(range(1, total + 1), repeat=len(seconds))
    assert done(shares) == min(done(counts) for counts in others if sum(counts) == total)


def test_pieces_by_speed_need_enough_of_them() -> None:
    assert apportion_by_speed(8, [1.0, 1.0]) == [4, 4]
    assert apportion_by_speed(7, [1.0, 1.0]) == [4, 3]
    with pytest.raises(UsageError, match="at least one of 1"):
        apportion_by_speed(1, [1.0, 1.0])

"""Who straggles, worked by hand and on production jobs; and how virtual workers follow measured speed."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.errors import UsageError
from gyrostat.job.diagnostics.stragglers import Pace, Straggler, StragglerPolicy, shares
from tests.sim.data import data


def steps(count: int, *seconds: float) -> list[dict[int, float]]:
    return [dict(enumerate(seconds)) for _ in range(count)]


def test_ten_slow_steps_make_a_straggler() -> None:
    pace = Pace()
    assert pace.add(steps(20, 1.0, 1.0, 1.0, 1.0)) == []
    assert pace.add(steps(5, 1.0, 1.0, 1.0, 1.4)) == []  # half of ten: the median is between
    assert pace.add(steps(1, 1.0, 1.0, 1.0, 1.4)) == [Straggler(member=3, seconds=1.4, usual=1.0)]
    assert pace.add(steps(5, 1.0, 1.0, 1.0, 1.4)) == []  # reported once
    assert pace.add(steps(9, 1.0, 1.0, 1.0, 1.0)) == []
    assert pace.stragglers() == []
    assert len(pace.add(steps(9, 1.0, 1.0, 1.0, 1.4))) == 1  # again


def test_a_worker_that_is_slow_from_the_beginning() -> None:
    assert Pace().add(steps(9, 1.0, 1.0, 1.34)) == []
    assert [found.member for found in Pace().add(steps(10, 1.0, 1.0, 1.34))] == [2]
    assert Pace().add(steps(10, 1.0, 1.0, 1.19)) == []


def test_when_all_become_slower_nobody_straggles() -> None:
    pace = Pace()
    pace.add(steps(50, 1.0, 1.0, 1.05))
    assert pace.add(steps(20, 2.0, 2.0, 2.1)) == []


def test_several_at_once_are_found() -> None:
    """Four of ten, and two that are always a bit slower: the median of a single step would hide them."""
    pace = Pace()
    pace.add(steps(100, *[1.0] * 8, 1.1, 1.1))
    found = pace.add(steps(10, *[1.0] * 4, *[1.28] * 4, 1.1, 1.1))
    assert [straggler.member for straggler in found] == [4, 5, 6, 7]


def test_alone_or_among_microseconds_nobody_straggles() -> None:
    assert Pace().add(steps(30, 5.0)) == []
    assert Pace().add(steps(30, 0.001, 0.001, 0.0015)) == []


def test_a_worker_that_leaves_is_forgotten_and_a_new_one_has_time() -> None:
    pace = Pace()
    pace.add(steps(30, 1.0, 1.0, 1.0))
    assert pace.add([{0: 1.0, 1: 1.0, 5: 9.0}] * 9) == []
    assert [found.member for found in pace.add([{0: 1.0, 1: 1.0, 5: 9.0}])] == [5]


@pytest.mark.parametrize(("factor", "count"), [(1.0, 10), (0.5, 10), (1.2, 0), (1.2, 101)])
def test_policies_that_cannot_be(factor: float, count: int) -> None:
    with pytest.raises(UsageError):
        StragglerPolicy(factor=factor, steps=count)


# Re-placement.


@pytest.mark.parametrize(("workers", "virtual_workers", "best"), [(4, 32, 9), (8, 128, 17)])
def test_a_worker_at_three_quarters_of_the_speed(workers: int, virtual_workers: int, best: int) -> None:
    """The best integer placement, found by hand: 9 of 32 on each full one, 17 of 128."""
    even = [virtual_workers // workers] * workers
    seconds = [1.0] * (workers - 1) + [4 / 3]
    wanted = shares(virtual_workers, even, seconds, 0.05)
    assert wanted is not None
    assert sum(wanted) == virtual_workers
    assert max(count * time for count, time in zip(wanted, seconds, strict=True)) == best
    assert shares(virtual_workers, wanted, seconds, 0.05) is None  # there it stays


@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8),
    st.integers(1, 8),
    st.lists(st.floats(-0.02, 0.02), min_size=8, max_size=8),
)
def test_noise_does_not_make_it_flap(seconds: list[float], each: int, noise: list[float]) -> None:
    """Once placed by speed, times that scatter by 2 % move nothing."""
    virtual_workers = each * len(seconds)
    now = shares(virtual_workers, [each] * len(seconds), seconds, 0.05) or [each] * len(seconds)
    scattered = [time * (1 + error) for time, error in zip(seconds, noise, strict=False)]
    moved = shares(virtual_workers, now, scattered, 0.05)
    before = max(count * time for count, time in zip(now, scattered, strict=True))
    if moved is not None:  # then it is worth it
        after = max(count * time for count, time in zip(moved, scattered, strict=True))
        assert after <= 0.95 * before


# Production jobs.


def recorded(job: int) -> dict[int, dict[int, float]]:
    """Mini-batch times of ten workers, every ten seconds, as far as all of them were there."""
    times: dict[int, dict[int, float]] = defaultdict(dict)
    with open(data(f"stragglers/job_{job}.csv"), newline="") as file:
        for row in csv.DictReader(file):
            times[int(row["time"])][int(row["worker"])] = float(row["batch_time_norm"])
    return {moment: by_worker for moment, by_worker in sorted(times.items()) if len(by_worker) == 10}


def labelled(times: Mapping[int, Mapping[int, float]]) -> set[int]:
    """The files have no labels. This rule knows no other worker, and it knows the future: a worker straggled if for a minute or
    more, give or take gaps of half a minute, it took over 1.2 times its own median of the whole recording.
    """
    found = set()
    for worker in range(10):
        usual = statistics.median(by_worker[worker] for by_worker in times.values())
        slow = [moment for moment, by_worker in times.items() if by_worker[worker] > 1.2 * usual]
        began = last = float("-inf")
        for moment in slow:
            if moment - last > 30:
                began = moment
            last = moment
            if last - began >= 60:
                found.add(worker)
    return found


@pytest.mark.parametrize(("job", "expected"), [(1, {6}), (2, set()), (3, {6, 7, 8, 9})])
def test_the_recorded_production_times(job: int, expected: set[int]) -> None:
    times = recorded(job)
    assert labelled(times) == expected
    pace = Pace()
    assert {straggler.member for moment in times for straggler in pace.add([times[moment]])} == expected

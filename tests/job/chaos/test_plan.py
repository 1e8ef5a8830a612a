"""The same seed, the same faults; and nobody is hit twice by one."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from gyrostat.job.chaos.plan import (
    LATEST_FIRST_S,
    OF_AGENTS,
    OF_CLUSTER,
    OF_ETCD,
    OF_SERVERS,
    OF_WORKERS,
    FaultKind,
    longest_standstill_s,
    plan,
    with_checkpoints,
)

ALL = tuple(dict.fromkeys((*OF_WORKERS, *OF_AGENTS, *OF_ETCD, *OF_CLUSTER, *OF_SERVERS)))


def test_a_seed_decides() -> None:
    first = list(islice(plan(7, every=2.0, kinds=ALL), 50))
    assert first == list(islice(plan(7, every=2.0, kinds=ALL), 50))
    assert first != list(islice(plan(8, every=2.0, kinds=ALL), 50))


def test_every_kind_comes_about_as_often_as_wanted() -> None:
    faults = list(islice(plan(1, every=2.0, kinds=ALL), 2000))
    times = Counter(fault.kind for fault in faults)
    assert set(times) == set(FaultKind)
    assert times.most_common(1)[0][0] is FaultKind.KILL
    assert 1.8 < sum(fault.after for fault in faults) / 2000 < 2.2
    assert {fault.kind for fault in islice(plan(1, every=2.0, kinds=OF_WORKERS), 500)} == set(OF_WORKERS)


@given(seed=st.integers(0, 1000), living=st.integers(0, 6), count=st.integers(1, 2))
def test_victims_are_different_and_there(seed: int, living: int, count: int) -> None:
    fault = next(plan(seed, every=1.0, kinds=ALL))
    victims = fault.victims(range(living), count)
    assert len(victims) == len(set(victims)) == min(count, living)
    assert set(victims) <= set(range(living))
    assert 1 <= fault.size(5) <= 5


def test_the_first_fault_hits_the_start_of_the_job() -> None:
    firsts = [next(plan(seed, every=100.0, kinds=ALL)).after for seed in range(200)]
    assert 0 <= min(firsts) < 0.5 < LATEST_FIRST_S - 0.5 < max(firsts) <= LATEST_FIRST_S


def test_some_rounds_have_no_checkpoints() -> None:
    assert {with_checkpoints(seed) for seed in range(20)} == {True, False}
    assert [with_checkpoints(seed) for seed in range(9)] == [with_checkpoints(seed) for seed in range(9)]


def test_a_hang_is_longer_than_what_faults_may_cost() -> None:
    """Stopped for three seconds, time-outs, restarts delayed by 1 + 2 + 4 s, and ten times an undisturbed start."""
    assert longest_standstill_s(start_s=5.0, timeouts_s=24.0, faults=3) == 3 + 24 + 7 + 50
    assert longest_standstill_s(start_s=1.0, timeouts_s=0.0, faults=0) == 3 + 30

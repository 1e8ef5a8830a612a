"""Gavel's max-min least attained service, with and without mixed allocations."""

from __future__ import annotations

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sched.policies import find_policy
from gyrostat.sched.policies.gavel import JobClass, max_min_shares
from tests.sched.little_cluster import LittleCluster

PLANNED = PlannedThroughput(
    {
        "picky": Profile("picky", {"v100": Speed(((1, 4.0),)), "k80": Speed(((1, 1.0),))}),
        "easy": Profile("easy", {"v100": Speed(((1, 2.0),)), "k80": Speed(((1, 1.0),))}),
    }
)


def job(
    name: str, workload: str, *, devices: int = 1, largest: int | None = None, at: float = 0.0
) -> JobRequest:
    return JobRequest(
        id=JobId(name),
        vc="all",
        submitted=at,
        devices=devices,
        max_devices=largest,
        virtual_workers=4,
        mixes_types=largest is not None,
        affinity=Affinity.SOFT,
        workload=f"{workload} (batch size 1)",
    )


def shares(kinds: list[JobClass], devices: list[int]) -> list[list[float]]:
    return max_min_shares(tuple(kinds), tuple(devices))


def test_each_job_goes_where_it_is_relatively_faster() -> None:
    """One v100, one k80, speeds 4 : 1 and 2 : 1. With x of the v100 for the first, (1 + 3x) / 2.5 = (2 - x) / 1.5 at x = 1/2.
    With 4 : 1 and 1 : 1 the second does not care, and the first has the v100 for itself."""
    close = shares([JobClass(1, 1, 1.0, (4.0, 1.0)), JobClass(1, 1, 1.0, (2.0, 1.0))], [1, 1])
    assert close == [pytest.approx([0.5, 0.5])] * 2
    clear = shares([JobClass(1, 1, 1.0, (4.0, 1.0)), JobClass(1, 1, 1.0, (1.0, 1.0))], [1, 1])
    assert clear == [pytest.approx([1.0, 0.0]), pytest.approx([0.0, 1.0])]


def test_equal_jobs_are_one_row_with_the_same_result() -> None:
    together = shares([JobClass(3, 1, 1.0, (4.0, 1.0)), JobClass(1, 1, 1.0, (2.0, 1.0))], [2, 1])
    apart = shares([JobClass(1, 1, 1.0, (4.0, 1.0))] * 3 + [JobClass(1, 1, 1.0, (2.0, 1.0))], [2, 1])
    fairness = [4 * x + y for x, y in apart[:3]]
    assert 4 * together[0][0] + together[0][1] == pytest.approx(sum(fairness) / 3, rel=1e-3)


def test_twice_the_weight_is_twice_the_share() -> None:
    light, heavy = shares([JobClass(1, 1, 1.0, (1.0,)), JobClass(1, 1, 2.0, (1.0,))], [1])
    assert [*light, *heavy] == pytest.approx([1 / 3, 2 / 3], abs=1e-3)


def test_a_type_on_which_it_cannot_run_gets_nothing() -> None:
    assert shares([JobClass(1, 1, 1.0, (0.0, 1.0))], [1, 1]) == [pytest.approx([0.0, 1.0])]
    assert shares([JobClass(1, 1, 1.0, (0.0,))], [1]) == [[0.0]]


def rounds(policy: str, number: int, *requests: JobRequest) -> list[dict[str, dict[str, int]]]:
    cluster = LittleCluster("v100:1x1,k80:1x1", policy, throughput=PLANNED)
    cluster.submit(0.0, *requests)
    dealt = [cluster.counts()]
    for k in range(1, number):
        cluster.tick(360.0 * k)
        dealt.append(cluster.counts())
    return dealt


def test_rounds_follow_the_shares() -> None:
    """Half of the v100 each: they change places in every round."""
    dealt = rounds("gavel", 8, job("p", "picky"), job("e", "easy"))
    assert all(len(held) == 2 for held in dealt)
    assert sum(held["p"] == {"v100": 1} for held in dealt) == 4


def test_three_jobs_on_one_device_take_turns() -> None:
    cluster = LittleCluster("v100:1x1", "gavel", throughput=PLANNED)
    cluster.submit(0.0, *(job(name, "easy") for name in "abc"))
    turns = []
    for k in range(1, 7):
        turns += list(cluster.counts())
        cluster.tick(360.0 * k)
    assert sorted(turns) == ["a", "a", "b", "b", "c", "c"]


def test_a_round_begins_at_once_where_no_job_has_devices_and_then_nothing_moves() -> None:
    cluster = LittleCluster("v100:1x1", "gavel", throughput=PLANNED)
    cluster.tick(100.0)
    assert [action.job for action in cluster.submit(100.5, job("a", "easy", at=100.5))] == ["a"]
    cluster.submit(200.0, job("b", "easy", at=200.0))
    plan = cluster.tick(201.0)
    assert (plan.actions, plan.wake_at, list(cluster.counts())) == ((), 460.5, ["a"])


def test_a_round_may_begin_late() -> None:
    """On a live cluster every tick is some milliseconds late."""
    cluster = LittleCluster("v100:1x1", "gavel:reset=0", throughput=PLANNED)
    cluster.submit(0.0, job("a", "easy"))
    cluster.submit(10.0, job("b", "easy", at=10.0))
    turns = []
    for number in range(1, 5):
        plan = cluster.tick(360.0 * number + 0.02 * number)
        assert plan.wake_at is not None
        turns += list(cluster.counts())
    assert sorted(turns) == ["a", "a", "b", "b"]


def test_time_before_shares_were_computed_does_not_count() -> None:
    """a has the device for 20 rounds alone. From then on both have it in turn, instead of b for 20 rounds."""
    cluster = LittleCluster("v100:1x1", "gavel", throughput=PLANNED)
    cluster.submit(0.0, job("a", "easy"))
    for number in range(1, 20):
        cluster.tick(360.0 * number)
    cluster.submit(7_190.0, job("b", "easy", at=7_190.0))
    turns = []
    for number in range(20, 30):
        cluster.tick(360.0 * number)
        turns += list(cluster.counts())
    assert sorted(turns) == ["a"] * 5 + ["b"] * 5


def test_a_job_that_comes_between_two_computations_gets_what_others_leave() -> None:
    cluster = LittleCluster("v100:1x2", "gavel", throughput=PLANNED)
    cluster.submit(0.0, job("a", "easy"))
    cluster.submit(10.0, job("b", "easy", at=10.0), job("c", "easy", at=10.0))
    cluster.tick(360.0)
    assert list(cluster.counts()) == ["a", "b"]


def test_idle_devices_join_a_job_that_may_mix_and_leave_when_another_wants_them() -> None:
    """Alone, 4 virtual workers of `picky` are no faster with a k80 beside the v100; `easy` (3 + 1: 1.5 s instead of 2) is."""
    cluster = LittleCluster("v100:1x1,k80:1x1", "gavel:mixed=yes,reset=0", throughput=PLANNED)
    cluster.submit(0.0, job("e", "easy", largest=4))
    assert cluster.counts() == {"e": {"v100": 1, "k80": 1}}
    cluster.submit(10.0, job("p", "picky", largest=4, at=10.0))
    assert cluster.counts() == {"e": {"v100": 1, "k80": 1}}
    cluster.tick(360.0)
    assert cluster.counts() == {"e": {"v100": 1}, "p": {"k80": 1}}
    cluster.finish(400.0, "p")
    cluster.tick(720.0)
    assert cluster.counts() == {"e": {"v100": 1, "k80": 1}}


def test_a_round_takes_time() -> None:
    with pytest.raises(UsageError, match="round must be more than 0 seconds, got 0"):
        find_policy("gavel:round=0")

"""Elastic-Tiresias: EDL's two rules on top of Tiresias."""

from __future__ import annotations

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Action, Resize, Start
from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sched.policies import find_policy
from gyrostat.sched.throughput import AnalyticScaling
from tests.sched.little_cluster import LittleCluster, request

HALF = AnalyticScaling(overhead=0.5)  # S(1) = 1, S(2) = 4/3, S(3) = 3/2, S(4) = 8/5 of one device's speed


def cluster(
    fleet: str, settings: str = "queues=10/1000,crowd=0,least=0.5", *, overhead: float = 0.5
) -> LittleCluster:
    return LittleCluster(fleet, f"elastic-tiresias:{settings}", throughput=AnalyticScaling(overhead=overhead))


def elastic(name: str, devices: int, *, at: float = 0.0, largest: int | None = None) -> JobRequest:
    return request(name, devices, at=at, smallest=1, largest=largest or devices)


def compacted(actions: tuple[Action, ...]) -> list[str]:
    """Whom the rule touched. Where it does not help, Tiresias preempts jobs of lower queues as ever."""
    return [action.job for action in actions if action.reason.startswith("compaction")]


def sizes(little: LittleCluster) -> dict[str, int]:
    return {name: len(devices) for name, devices in little.held().items()}


def test_compaction_by_hand() -> None:
    """a has 4 devices and has left the first queue. b wants 4. With p of them b is worth S(p) and a loses S(4) - S(4-p):
    p = 2 gains 4/3 - (8/5 - 4/3) = 16/15 of a device; p = 1 only 1 - (8/5 - 3/2) = 9/10, and a keeps half of its four."""
    little = cluster("gpu:1x4")
    little.submit(0.0, elastic("a", 4))
    assert little.submit(5.0, elastic("b", 4, at=5.0)) == (
        Resize(JobId("a"), (0, 1, 2, 3), (0, 1), "compaction: b makes better use of them"),
        Start(JobId("b"), (2, 3), "compaction: 2 of the 4 requested devices"),
    )


def test_jobs_of_the_first_queue_give_nothing() -> None:
    little = cluster("gpu:1x4", "queues=1000,crowd=0")
    little.submit(0.0, elastic("a", 4))
    assert compacted(little.submit(5.0, elastic("b", 4, at=5.0))) == []


def test_nobody_is_left_with_less_than_its_least() -> None:
    little = cluster("gpu:1x4", "queues=10/1000,crowd=0,least=0.75")
    little.submit(0.0, elastic("a", 4))
    assert compacted(little.submit(5.0, elastic("b", 1, at=5.0))) == ["a", "b"]
    assert sizes(little) == {"a": 3, "b": 1}
    assert compacted(little.submit(6.0, elastic("c", 1, at=6.0))) == []


def test_no_compaction_below_the_crowd() -> None:
    little = cluster("gpu:1x4", "queues=10/1000,crowd=2")
    little.submit(0.0, elastic("a", 4))
    assert compacted(little.submit(5.0, elastic("b", 4, at=5.0), elastic("c", 4, at=5.0))) == []
    assert sizes(little) == {"b": 4}
    assert compacted(little.submit(9.0, elastic("d", 4, at=9.0))) == ["b", "c"]
    assert sizes(little) == {"b": 2, "c": 2}


def test_without_a_gain_in_efficiency_nothing_is_compacted() -> None:
    """Where twice the devices are twice as fast, a device is worth as much here as there."""
    little = cluster("gpu:1x4", overhead=0.0)
    little.submit(0.0, elastic("a", 4))
    assert compacted(little.submit(5.0, elastic("b", 4, at=5.0))) == []


def test_devices_come_from_no_more_nodes_than_the_job_would_need() -> None:
    """x and y could give one each, on two nodes; b needs two within a node, for that holds all that it asked for."""
    little = cluster("gpu:2x3", "queues=1/1000,crowd=0,least=0.6")
    little.submit(0.0, elastic("x", 3), elastic("y", 3))
    assert compacted(little.submit(5.0, request("b", 3, at=5.0, smallest=2))) == []
    little = cluster("gpu:2x2", "queues=1/1000,crowd=0,least=0.5")
    little.submit(0.0, elastic("x", 2), elastic("y", 2))
    assert compacted(little.submit(5.0, elastic("c", 2, at=5.0))) == ["x", "c"]


def test_a_job_that_would_need_two_nodes_gets_devices_of_two() -> None:
    """EDL's limit: from no more nodes than what it asked for needs. c asked for 8 on nodes of 4. Two devices gain
    4/3 - 2 x (8/5 - 3/2) where x and y give one each, more than where one gives both.
    """
    little = cluster("gpu:2x4", "queues=1/1000,crowd=0,least=0.5")
    little.submit(0.0, elastic("x", 4), elastic("y", 4))
    assert compacted(little.submit(5.0, elastic("c", 8, at=5.0))) == ["x", "y", "c"]
    assert sizes(little) == {"x": 3, "y": 3, "c": 2}


def test_a_waiting_job_starts_smaller_on_what_is_free() -> None:
    little = cluster("gpu:1x4", "queues=1000,crowd=0")
    little.submit(0.0, request("fixed", 2))
    little.submit(1.0, elastic("a", 4, at=1.0))
    assert sizes(little) == {"fixed": 2, "a": 2}


def test_expansion_goes_to_the_largest_gain_and_back_when_a_job_waits() -> None:
    """One idle device: a on 1 gains S(2)/S(1) - 1 = 1/3, b on 2 only S(3)/S(2) - 1 = 1/8."""
    little = cluster("gpu:1x4")
    little.submit(0.0, elastic("a", 1, largest=4), elastic("b", 2, largest=4))
    assert sizes(little) == {"a": 2, "b": 2}
    little.submit(1.0, request("c", 1, at=1.0))
    assert sizes(little) == {"a": 1, "b": 2, "c": 1}
    little.finish(2.0, "c")
    assert sizes(little) == {"a": 2, "b": 2}


def test_only_as_many_give_back_as_are_needed() -> None:
    little = cluster("gpu:1x4")
    little.submit(0.0, elastic("a", 1, largest=2), elastic("b", 1, largest=2))
    assert sizes(little) == {"a": 2, "b": 2}
    shrunk, started = little.submit(1.0, request("c", 1, at=1.0))
    assert (shrunk.job, shrunk.reason) == ("a", "shrunk to its request: c waits")
    assert (started.job, started.reason) == ("c", "fits into free devices")
    assert sizes(little) == {"a": 1, "b": 2, "c": 1}


def test_expansion_takes_as_many_devices_as_whole_virtual_workers_need() -> None:
    """4 virtual workers are no faster on three devices than on two, but on four."""
    planned = PlannedThroughput({"w": Profile("w", {"gpu": Speed(((1, 1.0),))})})
    little = LittleCluster("gpu:1x4", "elastic-tiresias", throughput=planned)
    job = JobRequest(
        id=JobId("a"),
        vc="all",
        submitted=0.0,
        devices=1,
        max_devices=4,
        virtual_workers=4,
        workload="w (batch size 1)",
    )
    little.submit(0.0, job)
    assert sizes(little) == {"a": 4}


def test_when_the_crowd_has_gone_compacted_jobs_get_idle_devices_back() -> None:
    little = cluster("gpu:1x4", "queues=10/1000,crowd=1")
    little.submit(0.0, elastic("a", 4))
    little.submit(5.0, elastic("b", 2, at=5.0), elastic("c", 8, at=5.0))
    assert sizes(little) == {"a": 2, "b": 2}
    little.finish(6.0, "b")
    assert sizes(little) == {"a": 4}


def test_inelastic_jobs_are_left_as_they_are() -> None:
    little = cluster("gpu:1x4")
    little.submit(0.0, request("fixed", 3))
    assert sizes(little) == {"fixed": 3}
    assert compacted(little.submit(50.0, elastic("a", 2, at=50.0))) == ["a"]
    assert sizes(little) == {"fixed": 3, "a": 1}
    assert compacted(little.submit(60.0, request("late", 2, at=60.0))) == []


def test_a_running_job_makes_room_for_an_inelastic_one_of_full_size() -> None:
    little = cluster("gpu:1x4")
    little.submit(0.0, elastic("a", 4))
    assert compacted(little.submit(5.0, request("b", 2, at=5.0))) == ["a", "b"]
    assert sizes(little) == {"a": 2, "b": 2}


def test_expansion_waits_its_time_and_must_pay() -> None:
    little = cluster("gpu:1x2", "hold=60,price=10")
    little.submit(0.0, elastic("a", 1, largest=2))
    assert sizes(little) == {"a": 1}
    assert little.tick(1.0).wake_at == 60.0
    little.tick(60.0)
    assert sizes(little) == {"a": 2}
    dear = cluster("gpu:1x2", "hold=60,price=30")
    dear.submit(0.0, elastic("a", 1, largest=2))
    dear.tick(60.0)
    assert sizes(dear) == {"a": 1}


def test_it_grows_beyond_its_guarantee() -> None:
    little = LittleCluster(
        "gpu:2x2", "elastic-tiresias:crowd=0", quotas={"x": 2, "y": 2}, lends=True, throughput=HALF
    )
    little.submit(0.0, request("a", 2, vc="x", smallest=1, largest=4, soft=True))
    assert sizes(little) == {"a": 4}
    little.submit(1.0, request("b", 2, vc="y"))
    assert sizes(little) == {"a": 2, "b": 2}


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="above 0 and up to 1; got 0"):
        find_policy("elastic-tiresias:least=0")

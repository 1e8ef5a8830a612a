"""Optimus: marginal gains in remaining time."""

from __future__ import annotations

from gyrostat.sched.throughput import AnalyticScaling
from tests.sched.little_cluster import LittleCluster, request


def test_devices_go_where_they_shorten_the_remaining_time_most() -> None:
    """One each first, then by W/p - W/(p+1), W being 120 for a and 36 for b: 60 against 18, 20 against 18, 10 against 18."""
    cluster = LittleCluster("gpu:1x5", "optimus")
    cluster.submit(
        0.0,
        request("a", 1, smallest=1, largest=5, work=120.0, soft=True),
        request("b", 1, smallest=1, largest=5, work=36.0, soft=True),
    )
    assert {name: len(devices) for name, devices in cluster.held().items()} == {"a": 3, "b": 2}


def test_nobody_starves_and_more_than_helps_is_not_given() -> None:
    """With an overhead of one half per further device, S(p) = p / (1 + (p-1)/2) still rises, towards 2."""
    cluster = LittleCluster("gpu:1x4", "optimus", throughput=AnalyticScaling(overhead=1.0))
    cluster.submit(0.0, request("a", 1, smallest=1, largest=4, work=10.0, soft=True))
    assert {name: len(devices) for name, devices in cluster.held().items()} == {"a": 1}
    cluster.submit(0.0, *(request(name, 1, smallest=1, largest=4, work=0.1, soft=True) for name in "bcde"))
    assert set(cluster.held()) == {"a", "b", "c", "d"}


def test_it_deals_anew_every_interval() -> None:
    cluster = LittleCluster("gpu:1x4", "optimus:interval=600")
    cluster.submit(30.0, request("a", 1, smallest=1, largest=2, soft=True))
    assert cluster.tick(31.0).wake_at == 600.0
    assert cluster.tick(600.0).wake_at == 1200.0

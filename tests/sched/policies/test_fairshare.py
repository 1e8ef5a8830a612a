"""Elastic weighted fair sharing: VirtualFlow's Algorithm 1."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Resize
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.policies import find_policy
from gyrostat.sched.policies.fairshare import Claim, fair_shares
from gyrostat.sched.port import Progressed
from tests.sched.little_cluster import LittleCluster, request


def elastic(
    name: str, devices: int, *, at: float = 0.0, priority: int = 1, work: float | None = None
) -> JobRequest:
    return request(name, devices, at=at, smallest=1, soft=True, priority=priority, work=work)


def sizes(cluster: LittleCluster) -> dict[str, int]:
    return {name: len(devices) for name, devices in cluster.held().items()}


def test_the_three_jobs_of_the_papers_figure_10() -> None:
    """4 devices; jobs of priority 1, 5, 10 that want 4, 2, 4. Each newcomer shrinks what runs, and nobody waits."""
    cluster = LittleCluster("v100:1x4", "wfs")
    cluster.submit(0.0, elastic("bert-sst2", 4, priority=1))
    assert sizes(cluster) == {"bert-sst2": 4}
    cluster.submit(240.0, elastic("resnet", 2, priority=5))
    assert sizes(cluster) == {"bert-sst2": 2, "resnet": 2}
    cluster.submit(1020.0, elastic("bert-qnli", 4, priority=10))
    assert sizes(cluster) == {"bert-sst2": 1, "resnet": 1, "bert-qnli": 2}
    cluster.finish(1500.0, "resnet")
    assert sizes(cluster) == {"bert-sst2": 1, "bert-qnli": 3}
    cluster.finish(1600.0, "bert-qnli")
    assert sizes(cluster) == {"bert-sst2": 4}


def test_the_papers_example_of_two_and_eight() -> None:
    """8 devices, A wants 2 and B 8: without elasticity they never run together; with it both run, and nothing idles."""
    cluster = LittleCluster("gpu:1x8", "wfs")
    cluster.submit(0.0, elastic("a", 2), elastic("b", 8))
    assert sizes(cluster) == {"a": 2, "b": 6}


def test_a_newcomer_that_would_cost_a_more_urgent_job_waits() -> None:
    cluster = LittleCluster("gpu:1x2", "wfs")
    cluster.submit(0.0, elastic("urgent", 2, priority=10))
    assert cluster.submit(1.0, elastic("later", 1, priority=1)) == ()
    assert sizes(cluster) == {"urgent": 2}
    cluster.finish(2.0, "urgent")
    assert sizes(cluster) == {"later": 1}


def test_every_resize_says_why() -> None:
    cluster = LittleCluster("gpu:1x2", "wfs")
    cluster.submit(0.0, elastic("a", 2))
    shrink, _ = cluster.submit(1.0, elastic("b", 2))
    assert shrink == Resize(JobId("a"), (0, 1), (0,), "fair share 1 of 2")


def test_weights_by_work_and_by_what_remains() -> None:
    cluster = LittleCluster("gpu:1x4", "wfs:by=sjf")
    cluster.submit(0.0, elastic("long", 4, work=300.0))
    cluster.submit(1.0, elastic("short", 4, work=100.0))
    assert sizes(cluster) == {"long": 1, "short": 3}
    cluster = LittleCluster("gpu:1x4", "wfs:by=srtf")
    cluster.submit(0.0, elastic("long", 4, work=300.0))
    cluster.tick(1.0, Progressed(JobId("long"), 290.0, 1.0))
    assert cluster.submit(2.0, elastic("short", 4, work=100.0)) == ()


def test_inelastic_jobs_keep_what_they_asked_for() -> None:
    cluster = LittleCluster("gpu:1x4", "wfs")
    cluster.submit(0.0, request("fixed", 3), elastic("a", 4))
    assert sizes(cluster) == {"fixed": 3, "a": 1}
    cluster.submit(1.0, elastic("b", 4))
    assert sizes(cluster) == {"fixed": 3, "a": 1}


def test_a_resize_waits_for_its_turn_and_happens_then() -> None:
    cluster = LittleCluster("gpu:1x4", "wfs:hold=60")
    cluster.submit(0.0, elastic("a", 4), elastic("b", 2))
    assert sizes(cluster) == {"a": 2, "b": 2}
    plan = cluster.tick(10.0)
    assert plan.actions == ()
    cluster.finish(10.0, "b")
    assert sizes(cluster) == {"a": 2}
    assert cluster.tick(59.0).wake_at == 60.0
    cluster.tick(60.0)
    assert sizes(cluster) == {"a": 4}


def test_a_growth_that_does_not_pay_for_its_pause_is_left() -> None:
    """One more device of five is 25 % faster: within 60 s that is 15 s of work, less than a pause of 20 s."""
    cluster = LittleCluster("gpu:1x5", "wfs:hold=60,price=20")
    cluster.submit(0.0, elastic("a", 5), elastic("b", 1))
    cluster.finish(100.0, "b")
    assert sizes(cluster) == {"a": 4}


def test_growth_beyond_the_guarantee_is_lent_and_taken_back() -> None:
    cluster = LittleCluster("gpu:2x4", "wfs", quotas={"x": 4, "y": 4}, lends=True)
    cluster.submit(0.0, JobRequest(id=JobId("a"), vc="x", submitted=0.0, devices=8, min_devices=1))
    assert sizes(cluster) == {"a": 8}
    assert len(cluster.scheduler_state.jobs[JobId("a")].borrowed) == 4
    cluster.submit(1.0, JobRequest(id=JobId("b"), vc="y", submitted=1.0, devices=4, min_devices=1))
    assert sizes(cluster) == {"a": 4, "b": 4}
    assert cluster.scheduler_state.jobs[JobId("a")].borrowed == ()


@settings(deadline=None)
@given(
    claims=st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 5.0, 10.0]), st.integers(1, 3), st.integers(0, 8)),
        min_size=1,
        max_size=8,
    ),
    total=st.integers(0, 30),
)
def test_shares_respect_every_limit_and_leave_nothing_that_a_job_could_use(
    claims: list[tuple[float, int, int]], total: int
) -> None:
    given_ = {JobId(str(k)): Claim(w, least, least + more) for k, (w, least, more) in enumerate(claims)}
    shares = fair_shares(given_, total)
    assert sum(shares.values()) <= total
    for id_, share in shares.items():
        assert share == 0 or given_[id_].least <= share <= given_[id_].most
    left = total - sum(shares.values())
    if left:
        assert all(share in (0, given_[id_].most) for id_, share in shares.items())
        assert all(given_[id_].least > left for id_, share in shares.items() if not share)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="weighted by priority, sjf, srtf; not by 'age'"):
        find_policy("wfs:by=age")
    with pytest.raises(UsageError, match="raise hold, now 5"):
        find_policy("wfs:price=10,hold=5")

"""What a scheduler expects of jobs: profiles at first, then what they and others of their kind have measured."""

from __future__ import annotations

from functools import partial

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Resize, Start
from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.planner.history import Observation
from gyrostat.sched.planner.learned import LearnedThroughput
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sched.port import Progressed
from tests.sched.little_cluster import LittleCluster, yielding_job

PLANNED = PlannedThroughput(
    {
        "w": Profile("w", {"v100": Speed(((1, 4.0),)), "p100": Speed(((1, 2.0),))}),
        "other": Profile("other", {"v100": Speed(((1, 3.0),)), "p100": Speed(((1, 1.0),))}),
    }
)
job = partial(yielding_job, workload="w", mixes=False)


def little(fleet: str, **options: object) -> LittleCluster:
    return LittleCluster(fleet, "easyscale:hold=0", throughput=PLANNED, **options)  # type: ignore[arg-type]


def expected(cluster: LittleCluster, name: str, **counts: int) -> float:
    """Micro-batches per second."""
    view = cluster.scheduler_state.jobs[JobId(name)]
    return view.vc.rate(view, counts) * (view.request.virtual_workers or 1)


def test_devices_that_did_not_help_go_back_and_are_not_asked_for_again() -> None:
    """One device, then two: 4 micro-batches per second are expected of the first, 8 of both, and 3.9 are measured."""
    cluster = little("v100:1x2")
    cluster.submit(0.0, job("a", 2), job("b", 1))
    assert cluster.counts() == {"a": {"v100": 1}, "b": {"v100": 1}}
    cluster.tick(1.0, Progressed(JobId("a"), 0.0, 4.0 / 2), Progressed(JobId("b"), 0.0, 4.0))
    cluster.finish(2.0, "b")
    assert cluster.counts() == {"a": {"v100": 2}}
    plan = cluster.tick(3.0, Progressed(JobId("a"), 0.0, 3.9 / 2))
    assert plan.actions == (Resize(JobId("a"), (0, 1), (0,), "no faster with 1 v100 more"),)
    assert cluster.tick(4.0, Progressed(JobId("a"), 0.0, 4.0 / 2)).actions == ()
    (started,) = cluster.submit(5.0, job("c", 1, at=5.0))
    assert started == Start(JobId("c"), (1,), "a first device")


def test_a_job_that_is_slow_on_a_type_moves_away_from_it() -> None:
    """Expected 4 against 2 per second; measured 1 on the type that was thought to be the better one."""
    cluster = little("v100:1x1,p100:1x1")
    cluster.submit(0.0, job("a", 1))
    assert cluster.counts() == {"a": {"v100": 1}}
    assert cluster.tick(1.0, Progressed(JobId("a"), 0.0, 3.9)).actions == ()
    assert expected(cluster, "a", v100=1) == 3.9
    cluster.tick(2.0, Progressed(JobId("a"), 0.0, 1.0))
    assert cluster.counts() == {"a": {"p100": 1}}
    assert expected(cluster, "a", v100=1) == 1.0
    assert expected(cluster, "a", p100=1) == 2.0


def test_borrowed_devices_that_did_not_help_go_back() -> None:
    cluster = little("v100:2x1", quotas={"x": 1, "y": 1}, lends=True)
    cluster.submit(0.0, job("a", 2, vc="x"), job("y", 1, vc="y"))
    assert cluster.counts() == {"a": {"v100": 1}, "y": {"v100": 1}}
    cluster.tick(1.0, Progressed(JobId("a"), 0.0, 2.0))
    cluster.finish(2.0, "y")
    assert cluster.counts() == {"a": {"v100": 2}}
    plan = cluster.tick(3.0, Progressed(JobId("a"), 0.0, 1.5))
    assert [(action.job, action.reason) for action in plan.actions] == [("a", "no faster with 1 v100 more")]
    assert cluster.counts() == {"a": {"v100": 1}}


def test_measurements_as_expected_leave_the_profile_in_charge() -> None:
    cluster = little("v100:1x2")
    cluster.submit(0.0, job("a", 2))
    cluster.tick(1.0, Progressed(JobId("a"), 0.0, 8.0 / 2))
    assert cluster.scheduler_state.jobs[JobId("a")].companion is None


def test_later_jobs_begin_with_what_finished_ones_measured() -> None:
    """A third of what the profile says on v100: three jobs of the workload found out, the fourth starts where it is fast."""
    cluster = little("v100:1x1,p100:1x1")
    for number in range(3):
        at = 10.0 * number
        cluster.submit(at, job(f"a{number}", 1, at=at))
        cluster.tick(at + 1, Progressed(JobId(f"a{number}"), 0.0, 4.0 / 3 if number == 0 else 2.0))
        cluster.finish(at + 2, f"a{number}")
    (start,) = cluster.submit(40.0, job("b", 1, at=40.0))
    assert isinstance(start, Start)
    assert cluster.counts() == {"b": {"p100": 1}}
    assert expected(cluster, "b", v100=1) == pytest.approx(4 / 3)
    assert expected(cluster, "b", p100=1) == pytest.approx(2.0)
    (start,) = cluster.submit(41.0, job("c", 1, at=41.0, workload="other"))
    assert cluster.counts()["c"] == {"v100": 1}
    assert expected(cluster, "c", v100=1) == 3.0


def test_a_workload_without_profile_begins_with_the_ratios_that_others_measured() -> None:
    cluster = little("v100:1x2,p100:1x2")
    with pytest.raises(UsageError, match="which has no profile"):
        cluster.submit(0.0, job("unknown", 1, workload="new"))
    cluster = little("v100:1x1,p100:1x1")
    cluster.submit(0.0, job("a", 1))
    cluster.tick(1.0, Progressed(JobId("a"), 0.0, 1.0))  # moves to p100
    cluster.tick(2.0, Progressed(JobId("a"), 0.0, 2.0))
    cluster.finish(3.0, "a")
    cluster.submit(4.0, job("unknown", 1, at=4.0, workload="new"))
    assert cluster.counts() == {"unknown": {"p100": 1}}
    cluster.tick(5.0, Progressed(JobId("unknown"), 0.0, 0.7))
    assert expected(cluster, "unknown", p100=1) == 0.7


def test_reports_of_jobs_without_profile_change_nothing() -> None:
    cluster = LittleCluster("gpu:1x2", "easyscale:hold=0")
    plain = JobRequest(id=JobId("a"), vc="all", submitted=0.0, devices=2, min_devices=0)
    cluster.submit(0.0, plain)
    assert cluster.tick(1.0, Progressed(JobId("a"), 0.0, 0.01)).actions == ()
    assert cluster.counts() == {"a": {"gpu": 2}}


def learning(*history: Observation) -> LittleCluster:
    """Two fast and two slow devices, of which the cluster says that the fast ones are four times as fast."""
    return LittleCluster(
        "fast:1x2,slow:1x2",
        "easyscale:hold=0",
        throughput=LearnedThroughput({"fast": 400.0, "slow": 100.0}),
        history=history,
    )


def test_without_a_profile_ratios_are_assumed_and_the_first_measurement_sets_the_scale() -> None:
    """8 virtual workers: 3 + 3 + 1 + 1 on all four devices are no faster than 4 + 4 on the fast ones, so it gets these."""
    cluster = learning()
    cluster.submit(0.0, yielding_job("a", 8, workload="new", mixes=True))
    assert cluster.counts() == {"a": {"fast": 2}}
    cluster.tick(5.0, Progressed(JobId("a"), 50.0, 10.0))
    assert expected(cluster, "a", fast=2) == 80.0
    assert expected(cluster, "a", fast=1) == pytest.approx(40.0)
    assert expected(cluster, "a", slow=2) == pytest.approx(20.0)


def test_devices_of_another_type_join_where_that_helps() -> None:
    """10 virtual workers: 4 + 4 + 1 + 1 take four fifths of the time of 5 + 5."""
    cluster = learning()
    cluster.submit(0.0, yielding_job("a", 10, workload="new", mixes=True))
    assert cluster.counts() == {"a": {"fast": 2, "slow": 2}}


def test_a_workload_that_ran_before_begins_with_what_was_measured_then() -> None:
    """It was as fast on slow devices as on fast ones, whatever the cluster says of them."""
    seen = [Observation("old", type_, 1, 50.0) for type_ in ("fast", "slow")]
    cluster = learning(*seen)
    cluster.submit(0.0, yielding_job("a", 8, workload="old", mixes=True))
    assert cluster.counts() == {"a": {"fast": 2, "slow": 2}}
    assert expected(cluster, "a", slow=1) == pytest.approx(50.0)


def test_types_that_were_not_measured_keep_their_ratio() -> None:
    cluster = learning(Observation("old", "slow", 1, 10.0))
    cluster.submit(0.0, yielding_job("a", 8, workload="old", mixes=True))
    assert expected(cluster, "a", fast=1) == pytest.approx(40.0)


def test_measurements_of_finished_jobs_are_handed_over_to_be_kept() -> None:
    cluster = learning()
    cluster.submit(0.0, yielding_job("a", 8, workload="new", mixes=True))
    cluster.tick(5.0, Progressed(JobId("a"), 50.0, 10.0))
    cluster.finish(6.0, "a")
    (fresh,) = cluster.scheduler_state.estimates.fresh
    assert (fresh.workload, fresh.type) == ("new", "fast")
    assert fresh.samples_per_second == pytest.approx(40.0)

"""EasyScale's inter-job scheduler."""

from __future__ import annotations

from functools import partial

from gyrostat.core.devices import Counts
from gyrostat.core.plan import Resize, Start
from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sched.port import Withdrawn
from gyrostat.sched.throughput import AnalyticScaling
from tests.sched.little_cluster import LittleCluster, request, yielding_job

PLANNED = PlannedThroughput(
    {
        "even": Profile("even", {"v100": Speed(((1, 4.0),)), "p100": Speed(((1, 1.0),))}),
        "v100-only": Profile("v100-only", {"v100": Speed(((1, 1.0),))}),
    }
)
job = partial(yielding_job, workload="even", mixes=True)


def cluster(fleet: str, policy: str = "easyscale:hold=0", **options: object) -> LittleCluster:
    return LittleCluster(fleet, policy, throughput=PLANNED, **options)  # type: ignore[arg-type]


def test_jobs_start_on_a_first_device_and_grow_where_it_speeds_up_most() -> None:
    """4 devices: 8 virtual workers double with a second device (+100 %), so do 2; then 8 gain +50 % each from two more, and
    2 have no use for any."""
    little = cluster("v100:1x4")
    little.submit(0.0, job("eight", 8), job("two", 2))
    assert little.counts() == {"eight": {"v100": 2}, "two": {"v100": 2}}
    little.finish(1.0, "two")
    assert little.counts() == {"eight": {"v100": 4}}


def test_ties_go_to_the_larger_proposal() -> None:
    """From one device, +1 doubles and +3 quadruples: the same per device, so three are asked for at once."""
    little = cluster("v100:1x4")
    (started,) = little.submit(0.0, job("four", 4))
    assert started == Start(
        JobId("four"), (0, 1, 2, 3), "4.00 times as fast with 3 more: the highest speedup per device"
    )


def test_no_job_waits_while_another_could_release_devices() -> None:
    little = cluster("v100:1x4")
    little.submit(0.0, job("a", 4))
    shrink, start = little.submit(1.0, job("b", 4))
    assert isinstance(shrink, Resize)
    assert (shrink.job, len(shrink.devices), shrink.reason) == ("a", 3, "b starts")
    assert start == Start(JobId("b"), (3,), "a first device, from a, which loses least")


def test_the_donor_is_the_one_that_loses_least() -> None:
    """A third of its speed for 8 virtual workers on 4 devices, one half for 2 on 2."""
    little = cluster("v100:1x6")
    little.submit(0.0, job("two", 2), job("eight", 8))
    assert little.counts() == {"two": {"v100": 2}, "eight": {"v100": 4}}
    little.submit(1.0, job("x", 1))
    assert little.counts() == {"two": {"v100": 2}, "eight": {"v100": 3}, "x": {"v100": 1}}


def test_mixing_types_where_the_model_may() -> None:
    """5 virtual workers: 4 on a v100 and one on a p100 take as long as 4 alone."""
    little = cluster("v100:1x1,p100:1x1")
    little.submit(0.0, job("a", 5))
    assert little.counts() == {"a": {"v100": 1, "p100": 1}}


def test_models_that_must_stay_on_one_type_do_and_so_do_all_in_homogeneous_mode() -> None:
    little = cluster("v100:1x1,p100:1x1")
    little.submit(0.0, job("a", 5, mixes=False))
    assert little.counts() == {"a": {"v100": 1}}
    little = cluster("v100:1x1,p100:1x1", "easyscale:mixed=no,hold=0")
    little.submit(0.0, job("a", 5))
    assert little.counts() == {"a": {"v100": 1}}


def test_a_job_moves_to_a_faster_type_when_that_is_free() -> None:
    little = cluster("v100:1x1,p100:1x1", "easyscale:mixed=no,hold=0")
    little.submit(0.0, job("first", 1), job("second", 1))
    assert little.counts() == {"first": {"v100": 1}, "second": {"p100": 1}}
    little.finish(1.0, "first")
    assert little.counts() == {"second": {"v100": 1}}


def test_a_type_that_a_job_has_no_profile_for_is_not_used() -> None:
    little = cluster("p100:1x2")
    assert little.submit(0.0, job("a", 2, workload="v100-only")) == ()


def test_inelastic_jobs_start_whole_and_are_left_alone() -> None:
    little = cluster("v100:1x4")
    fixed = request("fixed", 3)
    little.submit(0.0, JobRequest(**{**fixed.__dict__, "workload": "even (batch size 1)"}))
    little.submit(1.0, job("a", 4), job("b", 4))
    assert little.counts() == {"fixed": {"v100": 3}, "a": {"v100": 1}}


def test_a_serving_load_takes_devices_and_gives_them_back() -> None:
    """Nobody is stopped: jobs shrink, and fill up again."""
    little = cluster("v100:1x4")
    little.submit(0.0, job("a", 4))
    (shrunk,) = little.tick(1.0, Withdrawn("v100", 3)).actions
    assert isinstance(shrunk, Resize)
    assert little.counts() == {"a": {"v100": 1}}
    little.tick(2.0, Withdrawn("v100", 0))
    assert little.counts() == {"a": {"v100": 4}}


def test_a_job_that_has_waited_past_the_time_out_comes_first() -> None:
    little = cluster("v100:1x1", "easyscale:timeout=100,hold=0")
    little.submit(0.0, job("running", 1))
    little.submit(1.0, job("old", 1, at=1.0))
    little.submit(50.0, job("older-but-resubmitted", 1, at=0.5))
    assert little.tick(102.0).actions == ()
    (started,) = little.finish(103.0, "running")
    assert started.job == "old"


def test_inside_a_vc_it_grows_beyond_the_guarantee() -> None:
    little = LittleCluster(
        "v100:2x2", "easyscale:hold=0", quotas={"x": 2, "y": 2}, lends=True, throughput=PLANNED
    )
    little.submit(0.0, job("a", 4, vc="x"))
    assert little.counts() == {"a": {"v100": 4}}
    little.submit(1.0, job("b", 2, vc="y"))
    assert little.counts() == {"a": {"v100": 2}, "b": {"v100": 2}}


class Sevenths(AnalyticScaling):
    """Seven devices are as fast as six."""

    def rate(self, request: JobRequest, counts: Counts) -> float:
        return min(sum(counts.values()), 6.0)


def test_devices_that_would_not_help_stay_free() -> None:
    little = LittleCluster("v100:1x8", "easyscale:hold=0", throughput=Sevenths())
    little.submit(0.0, job("a", 8))
    assert little.counts() == {"a": {"v100": 6}}

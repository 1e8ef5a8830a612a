"""Tiresias, Gittins, static priority and Gandiva on cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Preempt, Resize, Start
from gyrostat.core.request import JobId
from gyrostat.sched.policies import find_policy
from gyrostat.sched.policies.tiresias import gittins_index
from gyrostat.sched.tenant_state import Vc
from gyrostat.sched.views import Histogram
from gyrostat.sim.cluster import Costs
from gyrostat.sim.job import TraceJob
from gyrostat.sim.simulate import simulate
from tests.sched.little_cluster import LittleCluster, request


def finish_times(fleet: str, policy: str, *jobs: TraceJob, costs: Costs | None = None) -> dict[str, float]:
    cluster = LittleCluster(fleet, policy)
    vcs = [Vc(name="all", policy=find_policy(policy))]
    records = simulate(cluster.fleet, vcs, cluster.placer, jobs, costs=costs).records
    return dict(zip(records.ids, records.finished, strict=True))


def test_tiresias_demotes_at_its_threshold_and_the_newcomer_goes_first() -> None:
    """Two devices, threshold 10. a falls to the second queue at 5 s (2 x 5); b, which came at 3, then takes its
    devices. At 10 s it falls as well, to a's queue, but goes on: running jobs of a queue are its first.
    """
    assert finish_times(
        "gpu:1x2",
        "tiresias:queues=10",
        TraceJob(request("a", 2, at=0.0), 8.0),
        TraceJob(request("b", 2, at=3.0), 6.0),
    ) == {"a": 14.0, "b": 11.0}


def test_jobs_of_one_queue_do_not_preempt_each_other() -> None:
    cluster = LittleCluster("gpu:1x2", "tiresias:queues=1000")
    cluster.submit(0.0, request("a", 2))
    assert cluster.submit(1.0, request("b", 2)) == ()


def test_tiresias_preempts_as_few_and_as_low_as_needed_where_the_place_is() -> None:
    cluster = LittleCluster("gpu:2x4", "tiresias:queues=10")
    cluster.submit(0.0, *(request(f"s{k}", 1, at=0.0) for k in range(4)))
    cluster.submit(6.0, request("m", 2, at=6.0), request("n", 2, at=6.0))
    cluster.tick(20.0)  # all have fallen to the second queue, m and n at 11 s, after the others
    actions = cluster.submit(21.0, request("new", 4, at=21.0))
    assert [(type(action), action.job) for action in actions] == [
        (Preempt, "n"),
        (Preempt, "m"),
        (Start, "new"),
    ]
    assert actions[0].reason == "preempted by new"
    assert actions[2].reason == "queue 0, 0 device-seconds so far"


def test_service_on_borrowed_devices_does_not_make_a_job_sink_in_its_own_vc() -> None:
    """a borrows y's devices and has had 40 device-seconds by 20 s. It falls to the second queue for what it gets of x: 10."""
    cluster = LittleCluster("gpu:2x2", "tiresias:queues=10", quotas={"x": 2, "y": 2}, lends=True)
    cluster.submit(0.0, request("first", 2, vc="x"), request("a", 2, vc="x"))
    assert cluster.held() == {"first": (0, 1), "a": (2, 3)}
    job = cluster.scheduler_state.jobs[JobId("a")]
    assert cluster.tick(4.0).wake_at == 5.0  # when first falls
    cluster.tick(5.0)
    assert (job.borrowed, len(job.devices)) == ((), 2)  # a is ahead of first, and gets its devices
    assert (job.service(5.0), job.own_service(5.0), job.recent_service(9.0)) == (10.0, 0.0, 8.0)
    assert cluster.tick(9.0).wake_at == 10.0


def test_a_tick_is_asked_for_when_a_job_will_fall() -> None:
    cluster = LittleCluster("gpu:1x2", "tiresias:queues=10/100")
    assert cluster.tick(0.0, *()).wake_at is None
    cluster.submit(0.0, request("a", 2))
    assert cluster.tick(1.0).wake_at == 5.0
    assert cluster.tick(5.0).wake_at == 50.0
    assert cluster.tick(50.0).wake_at is None


def test_a_starving_job_goes_back_to_the_first_queue() -> None:
    """a runs for 25 s, falls, and b takes its device. After half as long again, at 37.5, it is back and served as if
    new.
    """
    cluster = LittleCluster("gpu:1x1", "tiresias:queues=25,promote=0.5")
    cluster.submit(0.0, request("a", 1))
    cluster.tick(25.0)
    cluster.submit(25.0, request("b", 1, at=25.0))
    assert cluster.held() == {"b": (0,)}
    assert cluster.tick(30.0).wake_at == 37.5
    assert cluster.held() == {"b": (0,)}
    actions = cluster.tick(37.5).actions
    assert [(type(action), action.job) for action in actions] == [(Preempt, "b"), (Start, "a")]
    assert cluster.scheduler_state.jobs[JobId("a")].recent_service(40.0) == 2.5
    assert cluster.scheduler_state.jobs[JobId("a")].service(40.0) == 27.5


def test_the_gittins_index_by_hand() -> None:
    """Services 4, 8, 12. Nothing attained, quantum 4: one of three finishes, 4 are spent: (1/3) / 4. With 4 attained
    two are left: one of them finishes within 4, and both take 4.
    """
    services = Histogram([4.0, 8.0, 12.0])
    assert gittins_index(services, 0.0, 4.0) == pytest.approx((1 / 3) / 4)
    assert gittins_index(services, 0.0, 12.0) == pytest.approx(1 / 8)
    assert gittins_index(services, 4.0, 4.0) == pytest.approx((1 / 2) / 4)
    assert gittins_index(services, 8.0, 4.0) == pytest.approx(1 / 4)
    assert gittins_index(services, 12.0, 4.0) == 0.0
    assert gittins_index(Histogram(), 0.0, 4.0) == 0.0


def test_gittins_prefers_whom_history_says_to_be_nearly_done() -> None:
    """Most jobs take 100 or 10,000. b has had 90 of them and so will probably end soon; a has had 10. After 2D-LAS
    both are in the first queue, where a, started first, would keep the only device.
    """
    policy = "gittins:queues=1000,services=100/100/100/10000"
    cluster = LittleCluster("gpu:1x1", policy)
    for number, (name, served) in enumerate({"a": 10.0, "b": 90.0}.items()):
        cluster.submit(float(number), request(name, 1, at=float(number)))
        cluster.scheduler_state.jobs[JobId(name)]._service = served
    a, b = (find_policy(policy).rank(cluster.scheduler_state.jobs[JobId(name)], 1.0)[0] for name in "ab")
    assert b < a


def test_histories_are_kept_by_vc() -> None:
    cluster = LittleCluster("gpu:1x2", "gittins")
    cluster.submit(0.0, request("a", 2), request("b", 1))
    cluster.finish(50.0, "a")
    assert cluster.scheduler_state.vcs["all"].view.history.steps() == [(100.0, 1)]


def test_static_priority_with_and_without_preemption() -> None:
    for preempts, held in ((False, {"low": (0, 1)}), (True, {"high": (0, 1)})):
        cluster = LittleCluster("gpu:1x2", f"priority:preempt={'yes' if preempts else 'no'}")
        cluster.submit(0.0, request("low", 2, priority=1))
        cluster.submit(1.0, request("middle", 2, priority=2), request("high", 2, priority=3))
        assert cluster.held() == held
    cluster.finish(2.0, "high")
    assert cluster.held() == {"middle": (0, 1)}


def test_gandiva_moves_small_jobs_out_of_the_way() -> None:
    """One device of each node is taken; a job of four waits under FIFO, but here one of the small ones moves."""
    for policy, expected in (("fifo", {}), ("gandiva", {"four"})):
        cluster = LittleCluster("gpu:2x4", policy)
        cluster.submit(0.0, request("x", 3), request("y", 3), request("s", 1), request("t", 1))
        cluster.finish(1.0, "x", "y")
        assert cluster.held() == {"s": (3,), "t": (7,)}
        actions = cluster.submit(2.0, request("four", 4, at=2.0))
        assert {action.job for action in actions if isinstance(action, Start)} == set(expected)
    assert actions[0] == Resize(JobId("s"), (3,), (4,), "makes room for four")
    assert cluster.held() == {"s": (4,), "t": (7,), "four": (0, 1, 2, 3)}


def test_gandiva_packs_two_jobs_on_a_device_and_unpacks_when_one_ends() -> None:
    """Both run at 0.8 from 2 s on. a has 8 left then and ends at 12; b has done 8 of 10 by then, and needs 2 more
    alone.
    """
    jobs = (TraceJob(request("a", 1, at=0.0), 10.0), TraceJob(request("b", 1, at=2.0), 10.0))
    times = finish_times("gpu:1x1", "gandiva:packed=0.8", *jobs, costs=Costs(sharing=0.8))
    assert times == {"a": pytest.approx(12.0), "b": pytest.approx(14.0)}
    assert finish_times("gpu:1x1", "gandiva", *jobs) == {"a": 10.0, "b": 20.0}


def test_a_guest_goes_when_its_host_loses_the_devices() -> None:
    cluster = LittleCluster("gpu:1x1", "gandiva:packed=0.8")
    (start, guest) = cluster.submit(0.0, request("a", 1), request("b", 1))
    assert isinstance(start, Start)
    assert isinstance(guest, Start)
    assert (guest.devices, guest.shares_with) == (start.devices, "a")
    assert cluster.scheduler_state.vcs["all"].view.used == {"gpu": 1}
    assert cluster.finish(1.0, "a") == ()
    assert cluster.scheduler_state.jobs[JobId("b")].host is None
    assert cluster.scheduler_state.vcs["all"].view.used == {"gpu": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nosuch", "there is no policy 'nosuch'; there are "),
        ("fifo:speed=3", "policy 'fifo' has no setting 'speed=3'; it has backfill"),
        ("fifo:backfill=perhaps", "backfill cannot be 'perhaps'"),
        ("tiresias:queues=10/5", "thresholds of queues must be positive and rise, got 10.0/5.0"),
        ("tiresias:promote=-1", "promote must be 0"),
        ("tiresias:order=age", "order must be one of running, simulator, start, got 'age'"),
        ("gandiva:packed=2", "packed in 0 … 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_policy(text)


def test_ranks_last_until_they_change() -> None:
    policy = find_policy("tiresias:queues=10")
    cluster = LittleCluster("gpu:1x2", "tiresias:queues=10")
    cluster.submit(0.0, request("a", 2), request("b", 2))
    running, waiting = (cluster.scheduler_state.jobs[JobId(name)] for name in "ab")
    assert policy.rank(running, 1.0) == ((0, 0.0, 3), 5.0)
    assert policy.rank(waiting, 1.0) == ((0, 1.0, 2), math.inf)


def test_a_job_that_falls_keeps_its_devices_from_an_older_one_of_its_new_queue() -> None:
    """Two devices, threshold 100. a falls at 50 s and loses its devices to c at 60 s. At 110 s c falls to a's queue and goes
    on: jobs of one queue do not preempt each other. In the order of the public simulator, and by first start, a takes its
    devices back.
    """
    jobs = (TraceJob(request("a", 2, at=0.0), 1_000.0), TraceJob(request("c", 2, at=60.0), 200.0))
    assert finish_times("gpu:1x2", "tiresias:queues=100", *jobs) == {"a": 1_200.0, "c": 260.0}
    for order in ("simulator", "start"):
        times = finish_times("gpu:1x2", f"tiresias:queues=100,order={order}", *jobs)
        assert times == {"a": 1_050.0, "c": 1_200.0}

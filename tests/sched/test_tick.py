"""One tick: exact plans for given changes."""

from __future__ import annotations

import logging

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Preempt, Resize, Start
from gyrostat.core.request import JobId
from gyrostat.sched.cells.load import loads
from gyrostat.sched.placers.cells import CellPlacer
from gyrostat.sched.port import Bound, NodeBack, NodeLost, Stopped, Submitted, Withdrawn
from tests.sched.little_cluster import LittleCluster, request


def test_jobs_start_in_order_on_the_fullest_nodes_that_have_room() -> None:
    cluster = LittleCluster("gpu:2x4")
    assert cluster.submit(0.0, request("a", 3), request("b", 2), request("c", 1)) == (
        Start(JobId("a"), (0, 1, 2), "next in line"),
        Start(JobId("b"), (4, 5), "next in line"),
        Start(JobId("c"), (3,), "next in line"),
    )


def test_the_head_of_the_line_blocks_the_rest() -> None:
    cluster = LittleCluster("gpu:2x4")
    cluster.submit(0.0, request("a", 3), request("b", 3))
    assert cluster.submit(1.0, request("c", 2), request("d", 1)) == ()
    assert cluster.finish(2.0, "a") == (
        Start(JobId("c"), (0, 1), "next in line"),
        Start(JobId("d"), (7,), "next in line"),
    )


def test_with_backfill_later_jobs_pass() -> None:
    cluster = LittleCluster("gpu:2x4", "fifo:backfill=yes")
    cluster.submit(0.0, request("a", 3), request("b", 3))
    assert [action.job for action in cluster.submit(1.0, request("c", 2), request("d", 1))] == ["d"]


def test_soft_affinity_takes_scattered_devices() -> None:
    cluster = LittleCluster("gpu:2x4")
    cluster.submit(0.0, request("a", 3), request("b", 3))
    assert cluster.submit(1.0, request("c", 2, soft=True)) == (Start(JobId("c"), (3, 7), "next in line"),)


def test_more_than_a_node_takes_whole_nodes_and_packs_the_rest() -> None:
    cluster = LittleCluster("gpu:4x4")
    cluster.submit(0.0, request("a", 2))
    assert cluster.submit(1.0, request("b", 10)) == (
        Start(JobId("b"), (2, 3, 4, 5, 6, 7, 8, 9, 10, 11), "next in line"),
    )


def test_quotas_limit_a_vc_and_the_rest_is_lent_until_its_owner_wants_it() -> None:
    cluster = LittleCluster("gpu:2x4", quotas={"x": 4, "y": 4}, lends=True)
    started = cluster.submit(0.0, request("a", 4, vc="x"), request("b", 4, vc="x"))
    assert started == (
        Start(JobId("a"), (0, 1, 2, 3), "next in line"),
        Start(JobId("b"), (4, 5, 6, 7), "no room in the guarantee; borrows", borrowed=(4, 5, 6, 7)),
    )
    assert cluster.submit(1.0, request("c", 2, vc="y")) == (
        Preempt(JobId("b"), (4, 5, 6, 7), "its borrowed devices are reclaimed for c"),
        Start(JobId("c"), (4, 5), "next in line"),
    )
    assert cluster.finish(2.0, "a") == (Start(JobId("b"), (0, 1, 2, 3), "next in line"),)


def test_a_borrower_is_promoted_where_it_runs_when_its_turn_comes() -> None:
    cluster = LittleCluster("gpu:2x4", quotas={"x": 4, "y": 4}, lends=True)
    cluster.submit(0.0, request("a", 4, vc="x"), request("b", 4, vc="x"), request("c", 4, vc="x"))
    (promoted,) = cluster.finish(1.0, "a")[:1]
    assert promoted == Resize(
        JobId("b"), (4, 5, 6, 7), (4, 5, 6, 7), "next in line; keeps its borrowed devices", borrowed=()
    )
    assert cluster.scheduler_state.jobs[JobId("b")].devices == (4, 5, 6, 7)
    assert cluster.scheduler_state.jobs[JobId("c")].borrowed == (0, 1, 2, 3)


def test_devices_are_lent_to_the_vc_that_has_borrowed_least() -> None:
    cluster = LittleCluster("gpu:3x2", quotas={"x": 0, "y": 0, "z": 6}, lends=True)
    jobs = [request(f"x{k}", 1, vc="x") for k in range(6)] + [request(f"y{k}", 1, vc="y") for k in range(6)]
    cluster.submit(0.0, *jobs)
    assert sorted(cluster.held()) == ["x0", "x1", "x2", "y0", "y1", "y2"]


def test_a_lost_node_stops_its_jobs_and_shrinks_elastic_ones() -> None:
    cluster = LittleCluster("gpu:2x2")
    cluster.submit(0.0, request("a", 1), request("b", 3, smallest=1, soft=True))
    assert cluster.held() == {"a": (0,), "b": (1, 2, 3)}
    plan = cluster.tick(1.0, NodeLost("gpu-0"))
    assert plan.actions == (
        Preempt(JobId("a"), (0,), "node gpu-0 is lost"),
        Resize(JobId("b"), (1, 2, 3), (2, 3), "node gpu-0 is lost"),
    )
    assert cluster.scheduler_state.vcs["all"].view.capacity == {"gpu": 2}
    assert cluster.tick(2.0, NodeBack("gpu-0")).actions == (Start(JobId("a"), (0,), "next in line"),)


def test_serving_load_takes_free_devices_first_and_gives_back() -> None:
    cluster = LittleCluster("gpu:2x4")
    cluster.submit(0.0, request("a", 4))
    assert cluster.tick(1.0, Withdrawn("gpu", 3)).actions == ()
    assert cluster.scheduler_state.vcs["all"].view.capacity == {"gpu": 5}
    (stopped,) = cluster.tick(2.0, Withdrawn("gpu", 5)).actions
    assert stopped == Preempt(JobId("a"), (0, 1, 2, 3), "needed by a serving load")
    assert cluster.tick(3.0, Withdrawn("gpu", 0)).actions == (
        Start(JobId("a"), (0, 1, 2, 3), "next in line"),
    )


def test_a_job_that_ran_before_keeps_its_devices() -> None:
    cluster = LittleCluster("gpu:2x4")
    plan = cluster.tick(
        0.0, Submitted(request("a", 2)), Bound(JobId("a"), (5, 6)), Submitted(request("b", 4))
    )
    assert plan.actions == (Start(JobId("b"), (0, 1, 2, 3), "next in line"),)
    assert cluster.held()["a"] == (5, 6)


def test_a_job_that_failed_to_start_waits_again() -> None:
    cluster = LittleCluster("gpu:1x4")
    cluster.submit(0.0, request("a", 4))
    plan = cluster.tick(5.0, Stopped(JobId("a"), "the image cannot be pulled"))
    assert plan.actions == (Start(JobId("a"), (0, 1, 2, 3), "next in line"),)
    assert cluster.scheduler_state.jobs[JobId("a")].starts == 2
    assert cluster.held() == {"a": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (request("a", 1), "job a exists already"),
        (
            request("b", 1, vc="who"),
            "job b belongs to VC 'who', which this cluster does not have; it has all",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused(again: object, message: str) -> None:
    cluster = LittleCluster("gpu:1x1")
    cluster.submit(0.0, request("a", 1))
    with pytest.raises(UsageError, match=message):
        cluster.submit(1.0, again)  # type: ignore[arg-type]


def test_a_tick_with_actions_logs_its_duration_and_one_without_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = LittleCluster("gpu:2x4")
    with caplog.at_level(logging.DEBUG, "gyrostat.sched.tick"):
        cluster.submit(0.0, request("a", 4), request("b", 4))
        cluster.submit(1.0, request("c", 4))
    (record,) = caplog.records
    assert record.getMessage().startswith("tick at 0.000 s: 2 changes, 2 actions, ")
    assert record.__dict__["actions"] == 2
    assert record.__dict__["duration_ms"] >= 0.0


@pytest.mark.parametrize("cells", [False, True])
def test_a_preempted_job_goes_on_as_a_borrower_where_others_can_be_bound(cells: bool) -> None:
    """HiveD's lazy preemption. a falls to the second queue at 5 s, and b comes. y's devices are idle: b gets them, and a
    keeps its own, as a borrower. When y wants its devices, a, which borrows now, leaves.
    """
    placer = None
    if cells:
        placer = CellPlacer(
            loads(
                "cell_types: {node: {of: gpu, count: 2, node: true}}\n"
                "physical_cluster: [{cell: node, nodes: [n0, n1]}]\n"
                "virtual_clusters: {x: {cells: {node: 1}}, y: {cells: {node: 1}}}\n",
                "the test",
            ),
            lends=True,
        )
    cluster = LittleCluster(
        "gpu:2x2", "tiresias:queues=10", quotas={"x": 2, "y": 2}, lends=True, placer=placer
    )
    cluster.submit(0.0, request("a", 2, vc="x"))
    held = cluster.held()["a"]
    cluster.tick(5.0)
    actions = cluster.submit(6.0, request("b", 2, vc="x", at=6.0))
    a = cluster.scheduler_state.jobs[JobId("a")]
    assert (a.devices, a.borrowed, a.starts) == ((), held, 1)
    assert [(type(action), action.job) for action in actions] == [(Resize, "a"), (Start, "b")]
    assert actions[0].reason == "preempted by b; keeps its devices as a borrower"
    assert set(cluster.held()["b"]).isdisjoint(held)
    cluster.submit(7.0, request("c", 2, vc="y", at=7.0))
    assert set(cluster.held()) == {"b", "c"}

"""When a job that has to leave devices may still reach a boundary, when its workers there are ended, and when its host."""

from __future__ import annotations

import pytest

from gyrostat.cluster.eviction import Eviction, EvictionStep, LeaveDeadlines, next_eviction
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.occupancy import Holder, Occupancy
from gyrostat.cluster.records import JobRecord
from gyrostat.cluster.waiting import explain_holders, waits_for

_WAIT = Eviction(EvictionStep.WAIT, "it leaves at its next boundary", 130.0)
_LATE = "it has not left devices 2, 3 within 30 s"
_WORKERS = Eviction(
    EvictionStep.END_WORKERS, f"{_LATE}: its workers there are killed, and the others go on", 135.0
)
_HOST = Eviction(EvictionStep.KILL_HOST, f"{_LATE}: it is killed", None)
_SILENT = Eviction(
    EvictionStep.KILL_HOST, f"{_LATE}, and its host did not end its workers there: it is killed", None
)


@pytest.mark.parametrize(
    ("now", "staying", "trains", "eviction"),
    [
        (100.0, (0, 1), True, _WAIT),
        (129.9, (0, 1), True, _WAIT),
        (130.0, (0, 1), True, _WORKERS),
        (134.9, (0, 1), True, _WORKERS),
        (135.0, (0, 1), True, _SILENT),
        (129.9, (0, 1), False, _WAIT),
        (130.0, (0, 1), False, _HOST),
        (129.9, (), True, _WAIT),
        (130.0, (), True, _HOST),
    ],
)
def test_steps(now: float, staying: tuple[int, ...], trains: bool, eviction: Eviction) -> None:
    found = next_eviction(now=now, deadline=130.0, grace=30.0, leaving=(2, 3), staying=staying, trains=trains)
    assert found == eviction


def test_a_deadline_is_brought_forward_and_never_put_off() -> None:
    deadlines = LeaveDeadlines()
    assert deadlines.first() is None
    deadlines.update((2, 3), 30.0, 100.0)
    deadlines.update((3, 4), 30.0, 110.0)
    assert deadlines.first() == (130.0, 30.0), "of device 3"
    deadlines.update((3, 4), 600.0, 115.0)
    assert deadlines.first() == (130.0, 30.0)
    deadlines.update((3, 4), 10.0, 116.0)
    assert deadlines.first() == (126.0, 10.0)
    deadlines.update((4,), 30.0, 117.0)
    assert deadlines.first() == (126.0, 10.0)
    deadlines.update((), 30.0, 118.0)
    deadlines.update((4,), 30.0, 119.0)
    assert deadlines.first() == (149.0, 30.0), "a new one"


def test_which_jobs_hold_devices_of_others_and_since_when() -> None:
    now = [100.0]
    occupancy = Occupancy(clock=lambda: now[0])
    occupancy.entitle("j1", (0, 1, 2))
    assert occupancy.acquire("j1", (0, 1, 2))
    occupancy.entitle("j1", (0, 1))
    now[0] = 107.0
    occupancy.entitle("j1", (0,))
    now[0] = 110.0
    assert occupancy.holders("j2", (1, 2)) == [Holder("j1", (1, 2), 10.0)]
    assert occupancy.holders("j2", (0,)) == [], "both are entitled to it"
    assert not occupancy.acquire("j2", (1,))
    occupancy.release("j1", keep=(0, 1))
    assert occupancy.holders("j2", (1, 2)) == [Holder("j1", (1,), 3.0)]
    text = explain_holders(occupancy.holders("j2", (1, 2)), 30.0)
    assert text == "its devices are still held by j1 (on 1), which must leave within 30 s"
    waits = waits_for(
        JobRecord(id="j2", number=2, name="x", tenant="me", vc="default", spec=JobSpec(script="x.py")),
        occupancy.holders("j2", (1, 2)),
        30.0,
    )
    assert waits.why == f"{text}; asked to leave: j1 3 s ago"
    occupancy.release("j1")
    assert occupancy.acquire("j2", (1, 2))

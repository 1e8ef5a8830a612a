"""Our allocator against decisions of HiveD's own code, recorded on random sequences (`recorded_hived` says how)."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from gyrostat.sched.cells.request import Grant
from tests.sched.cells.recorded_hived import ComparedDecision, compare
from tests.sim.data import data

SEEDS = (1, 2, 3, 5)


@cache
def decisions(config: str, kind: str) -> list[ComparedDecision]:
    return [
        decision
        for seed in SEEDS
        for decision in compare(data(f"peers/hived/{config}-{seed}-{kind}.json"), lazy=kind == "lazy")
    ]


@pytest.mark.parametrize("kind", ["eager", "lazy"])
@pytest.mark.parametrize("config", ["A", "B", "C"])
def test_what_hived_grants_is_granted(config: str, kind: str) -> None:
    """C has bad machines. Where not all tenants' cells fit on healthy ones, HiveD decides when a machine fails which tenant is
    short, we decide when a tenant asks: then one or the other may be refused.
    """
    refused = [
        (decision.event["i"], decision.ours)
        for decision in decisions(config, kind)
        if decision.granted_by_hived and not isinstance(decision.ours, Grant) and not decision.short
    ]
    assert refused == []


def taken(kind: str) -> Counter[str]:
    """Devices of opportunistic and of guaranteed jobs that both took for requests that both granted."""
    found: Counter[str] = Counter()
    for config in ("A", "B", "C"):
        for decision in decisions(config, kind):
            if decision.granted_by_hived and isinstance(decision.ours, Grant):
                theirs = decision.event.get("victims", ())
                for borrowed, name in ((True, "opportunistic"), (False, "guaranteed")):
                    found[f"{name}, ours"] += decision.taken(decision.ours.preempted, borrowed=borrowed)
                    found[f"{name}, hived"] += decision.taken(theirs, borrowed=borrowed)
    return found


def test_no_more_devices_are_taken_from_borrowers_than_by_hived() -> None:
    found = taken("eager")
    assert found["opportunistic, hived"] > 1_000
    assert found["opportunistic, ours"] <= found["opportunistic, hived"], found
    assert found["guaranteed, ours"] <= found["guaranteed, hived"], found


def test_nor_if_preempted_jobs_may_go_on_as_borrowers() -> None:
    """HiveD's lazy preemption: a job of lower priority keeps its devices, as a borrower, if others can be bound."""
    found = taken("lazy")
    assert found["guaranteed, ours"] <= found["guaranteed, hived"], found
    assert sum(found[f"{name}, ours"] for name in ("opportunistic", "guaranteed")) <= sum(
        found[f"{name}, hived"] for name in ("opportunistic", "guaranteed")
    ), found

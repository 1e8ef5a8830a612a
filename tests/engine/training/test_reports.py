"""What workers know after a pass, from the reports of all of them."""

from __future__ import annotations

import pytest
import torch

from gyrostat.core.phase import AgentPresence
from gyrostat.engine.state import statetree
from gyrostat.engine.training.reports import (
    Fence,
    PassReport,
    RequestBox,
    Requests,
    agreed_fence,
    merge,
    scalar,
)

PRESENT, AWAY, ORPHANED = AgentPresence


def report(
    *, agent: AgentPresence = PRESENT, losses: tuple[float, ...] = (), leaving: bytes = b""
) -> PassReport:
    return PassReport(list(losses), [], Requests(), agent, 1, None, 0.0, b"", b"", [], leaving)


def test_a_fence_holds_if_all_acknowledge_it_at_the_latest_step() -> None:
    assert agreed_fence([Fence(2, 5), Fence(2, 7), Fence(2, 6)]) == Fence(2, 7)
    assert agreed_fence([Fence(2, 5), None]) is None
    assert agreed_fence([Fence(2, 5), Fence(3, 5)]) is None


def test_only_requests_that_were_seen_are_cleared() -> None:
    box = RequestBox()
    box.put(Requests(checkpoint=True))
    assert box.take() == Requests(checkpoint=True)
    box.put(Requests(stop=True))
    box.put(Requests(written=True))
    assert box.take() == Requests(stop=True, written=True)
    assert box.take() == Requests()


@pytest.mark.parametrize(
    ("recovers", "agents", "stops"),
    [
        (True, (ORPHANED, PRESENT), False),
        (True, (ORPHANED, ORPHANED), True),
        (True, (ORPHANED, AWAY), True),  # nobody is left to recover from the first one's end, which is near
        (True, (AWAY, AWAY), False),
        (False, (ORPHANED, PRESENT), True),
        (False, (AWAY, PRESENT), False),
    ],
)
def test_orphaned_workers_stop_a_job_that_cannot_go_on_without_them(
    recovers: bool, agents: tuple[AgentPresence, ...], stops: bool
) -> None:
    outcome = merge([report(agent=each) for each in agents], recovers=recovers)
    assert outcome.requests.stop is stops


def test_losses_are_averaged_and_positions_collected() -> None:
    reports = [report(losses=(1.0, 3.0)), report(leaving=statetree.encode({2: {"at": 5}}))]
    outcome = merge(reports, recovers=False)
    assert (outcome.loss, outcome.samples, outcome.leaving) == (2.0, 2, {2: {"at": 5}})
    assert merge([report()], recovers=False).loss is None


def test_a_loss_that_is_not_one_number_is_averaged() -> None:
    assert scalar(torch.tensor([1.0, 2.0])) == 1.5
    assert scalar(torch.tensor([4.0])) == 4.0

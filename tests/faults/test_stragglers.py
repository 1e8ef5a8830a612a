"""Real workers of unlike speed: the slow one is noticed, relieved or removed, and the bits stay the same."""

from __future__ import annotations

from gyrostat.core.events import EventKind
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.diagnostics.stragglers import Reaction, StragglerPolicy
from tests.conftest import Launch
from tests.faults.test_graceful_exit import FAST, SCRIPT

SLOW = (200.0, 200.0, 50.0)
"""A virtual worker's two samples take 10 ms, on worker 2 they take 40."""


def run(launch: Launch, reaction: Reaction) -> Outcome:
    policy = StragglerPolicy(reaction=reaction)
    outcome = launch(SCRIPT, virtual_workers=4, workers=3, paced=SLOW, stragglers=policy)
    assert outcome.digest == launch(SCRIPT, virtual_workers=4, paced=FAST).digest
    assert set(outcome.exit_codes) == {0}
    first = next(event for event in outcome.events if event.kind is EventKind.STRAGGLER)
    assert first.reason.startswith("worker 2 is ")
    return outcome


def test_it_is_reported(launch: Launch) -> None:
    outcome = run(launch, Reaction.REPORT)
    assert {event.kind for event in outcome.events} == {EventKind.STRAGGLER}


def test_it_is_removed(launch: Launch) -> None:
    outcome = run(launch, Reaction.REMOVE)
    assert outcome.workers == 2
    (event,) = [event for event in outcome.events if event.kind is EventKind.RESIZE]
    assert (event.from_workers, event.to_workers) == (3, 2)
    assert "worker 2 is" in event.reason


def test_virtual_workers_are_taken_from_it(launch: Launch) -> None:
    """Four virtual workers on two: the slow one keeps one."""
    policy = StragglerPolicy(reaction=Reaction.REPLACE)
    outcome = launch(SCRIPT, virtual_workers=4, workers=2, paced=(200.0, 60.0), stragglers=policy)
    assert outcome.digest == launch(SCRIPT, virtual_workers=4, paced=FAST).digest
    (event,) = [event for event in outcome.events if event.kind is EventKind.RESIZE]
    assert (event.from_workers, event.to_workers) == (2, 2)
    assert event.reason.endswith("[3, 1] instead of [2, 2] of them each")

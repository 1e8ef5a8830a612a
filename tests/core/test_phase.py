"""Phases change only as their tables say."""

from __future__ import annotations

import pytest

from gyrostat.core.phase import (
    JOB_TRANSITIONS,
    RECONFIGURATION_TRANSITIONS,
    IllegalTransition,
    JobPhase,
    ReconfigurationPhase,
    transition,
)


def test_the_tables_are_complete() -> None:
    assert set(JOB_TRANSITIONS) == set(JobPhase)
    assert set(RECONFIGURATION_TRANSITIONS) == set(ReconfigurationPhase)


def test_every_phase_can_be_reached_and_the_job_can_always_end() -> None:
    assert set().union(*JOB_TRANSITIONS.values()) == set(JobPhase) - {JobPhase.WAITING_FOR_NODES}
    assert {phase for phase, after in JOB_TRANSITIONS.items() if JobPhase.ENDED not in after} == {
        JobPhase.ENDED
    }


@pytest.mark.parametrize("phase", JobPhase)
def test_a_phase_is_followed_by_those_of_its_table_only(phase: JobPhase) -> None:
    for after in JobPhase:
        if after in JOB_TRANSITIONS[phase] or after is phase:
            assert transition(phase, after, JOB_TRANSITIONS) is after
        else:
            with pytest.raises(IllegalTransition, match=f"{after.name} may not follow {phase.name}"):
                transition(phase, after, JOB_TRANSITIONS)

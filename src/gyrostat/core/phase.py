"""The phases of a running job, and which phase may follow which.

A phase is an enum member that others compare; its text is for people. Each table below is the complete list of legal changes.
`transition` is the only way to change a phase, and raises on any other change; the owner of a phase has one method that calls
it (`Leader._enter`, `Coordinator._enter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import TypeVar

P = TypeVar("P", bound=StrEnum)


class IllegalTransition(RuntimeError):
    """A phase was to be followed by one that may not follow it. An error of the program, never of its user."""


class JobPhase(StrEnum):
    """What the leader of a job is doing with it.

    | phase | meaning | ends when |
    |---|---|---|
    | WAITING_FOR_NODES | the job has not been started | enough nodes have an agent |
    | STARTING | the first workers start | training begins |
    | TRAINING | workers train; see `ReconfigurationPhase` | they finish, fail, or the job is suspended |
    | RESTARTING | all workers have ended after a failure; the next attempt waits for its time | it starts |
    | SUSPENDING | workers were asked to checkpoint and to end | all have ended |
    | SUSPENDED | no workers; the checkpoint holds all state | a client requests workers, or stops the job |
    | RESUMING | workers start from the checkpoint of a suspended job | training begins |
    | ENDING | a worker has ended with the result | all have ended |
    | ENDED | the outcome is known | – |
    """

    WAITING_FOR_NODES = "waiting for nodes"
    STARTING = "starting"
    TRAINING = "training"
    RESTARTING = "starting again"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    ENDING = "ending"
    ENDED = "ended"


JOB_TRANSITIONS: Mapping[JobPhase, frozenset[JobPhase]] = {
    JobPhase.WAITING_FOR_NODES: frozenset({JobPhase.STARTING, JobPhase.ENDED}),
    JobPhase.STARTING: frozenset({JobPhase.TRAINING, JobPhase.RESTARTING, JobPhase.ENDING, JobPhase.ENDED}),
    JobPhase.TRAINING: frozenset({JobPhase.RESTARTING, JobPhase.SUSPENDING, JobPhase.ENDING, JobPhase.ENDED}),
    JobPhase.RESTARTING: frozenset({JobPhase.STARTING, JobPhase.RESUMING, JobPhase.ENDED}),
    JobPhase.SUSPENDING: frozenset({JobPhase.SUSPENDED, JobPhase.RESTARTING, JobPhase.ENDED}),
    JobPhase.SUSPENDED: frozenset({JobPhase.RESUMING, JobPhase.ENDED}),
    JobPhase.RESUMING: frozenset({JobPhase.TRAINING, JobPhase.RESTARTING, JobPhase.ENDING, JobPhase.ENDED}),
    JobPhase.ENDING: frozenset({JobPhase.RESTARTING, JobPhase.ENDED}),
    JobPhase.ENDED: frozenset(),
}


class ReconfigurationPhase(StrEnum):
    """How far a change of a training job's workers is. Only the last phase of a change touches training.

    | phase | meaning | ends when |
    |---|---|---|
    | STEADY | no change is under way | one is requested, or a worker dies |
    | STARTING_WORKERS | new workers start, import, build their model | all are ready |
    | CONNECTING | old and new workers connect as the next generation | all are connected |
    | FENCED | all know the boundary at which the next generation begins | all new workers have begun it |
    | RECOVERING | workers were lost; the others connect as the next generation | all have |

    Any change that fails goes back to STEADY.
    """

    STEADY = "steady"
    STARTING_WORKERS = "starting workers"
    CONNECTING = "connecting"
    FENCED = "fenced"
    RECOVERING = "recovering"


_R = ReconfigurationPhase
RECONFIGURATION_TRANSITIONS: Mapping[ReconfigurationPhase, frozenset[ReconfigurationPhase]] = {
    _R.STEADY: frozenset({_R.STARTING_WORKERS, _R.CONNECTING, _R.RECOVERING}),
    _R.STARTING_WORKERS: frozenset({_R.CONNECTING, _R.STEADY}),
    _R.CONNECTING: frozenset({_R.FENCED, _R.STEADY}),
    _R.FENCED: frozenset({_R.STEADY}),
    _R.RECOVERING: frozenset({_R.STEADY}),
}


def transition(before: P, after: P, table: Mapping[P, frozenset[P]]) -> P:
    """`after`, if `table` allows it to follow `before`. A phase may always stay as it is."""
    if after is not before and after not in table[before]:
        raise IllegalTransition(f"{type(before).__name__}: {after.name} may not follow {before.name}")
    return after


class AgentPresence(IntEnum):
    """Whether a worker has an agent, as it knows."""

    PRESENT = 0
    AWAY = 1
    ORPHANED = 2
    """It has been away for so long that the worker will soon be killed."""

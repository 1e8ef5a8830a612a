"""The next state of a job after it ends, fails or loses its host. Pure; the cluster acts on it.

The delay after a failure doubles from a second to five minutes. An error that repeats is not tried a third time: the same
message after the same step would come again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.records import Intent, JobRecord, JobState
from gyrostat.core.backoff import Backoff
from gyrostat.core.plural import plural

_RETRY_DELAY = Backoff(first_s=1.0, longest_s=300.0)
_POSTPONED_S = 30.0
_DEATHS = 3
"""A job whose host was killed more often than this without any progress has failed."""


@dataclass(frozen=True)
class NextState:
    """The state that follows, and why."""

    state: JobState
    reason: str
    kind: str | None
    """Of the event; None: no event."""
    leaves: bool
    """It leaves the scheduler, for good or for a while."""
    after: float | None = None
    """Seconds until it is tried again."""
    fields: Mapping[str, Any] = field(default_factory=dict)


def next_state_of(
    record: JobRecord,
    result: AttemptResult | None,
    *,
    entitled: bool,
    verdict: str | None = None,
    deaths: int = 0,
    checkpoint: int | None = None,
    evicted: str | None = None,
) -> NextState:
    """`record` is the job before, `result` what its host wrote (None: the host was killed).

    `entitled`: the scheduler assigns devices to it. `verdict`: why it had to stop for good. `deaths`: how often in a row its
    host was killed without any progress, this time included. `checkpoint`: the step of its newest checkpoint; None: it has
    none. `evicted`: why the cluster killed its host, if it did.
    """
    if result is not None and result.finished:
        fields = {
            "step": result.step,
            "loss": result.loss,
            "exit_code": result.exit_code,
            "digest": result.digest,
        }
        return NextState(JobState.FINISHED, result.reason, "finished", True, fields=fields)
    if record.intent is Intent.CANCEL:
        return NextState(JobState.CANCELLED, "cancelled by its owner", "cancelled", True)
    if verdict is not None:
        return NextState(JobState.FAILED, verdict, "failed", True, fields=_failure_fields(result))
    if record.intent is Intent.PAUSE:
        return NextState(JobState.PAUSED, "paused by its owner", "paused", True)
    if result is None and deaths > _DEATHS:
        reason = f"its host was killed {plural(deaths, 'time')} without any progress"
        return NextState(JobState.FAILED, reason, "failed", True, fields={"exit_code": 137})
    if result is not None and result.postponed:
        waits = JobState.SUSPENDED if record.attempts > 1 else JobState.QUEUED
        reason = f"{result.reason}; tried again in {_POSTPONED_S:g} s"
        return NextState(waits, reason, "postponed", True, _POSTPONED_S)
    if result is not None and not result.stopped:
        return _failed(record, result)
    state = JobState.STARTING if entitled else JobState.SUSPENDED
    if result is not None:
        return NextState(state, record.reason, None, False)
    where = (
        "the beginning: it has no checkpoint"
        if checkpoint is None
        else f"its checkpoint of step {checkpoint}"
    )
    restarts = "restarts" if entitled else "will restart"
    reason = f"{evicted or 'its host was killed'}; it {restarts} from {where}"
    return NextState(state, reason, "restarted", False)


def _failed(record: JobRecord, result: AttemptResult) -> NextState:
    allowed, reason, failure = record.spec.retries, result.reason, _failure_fields(result)
    if not result.retriable:
        reason = f"{reason}; it would fail in the same way again"
    elif record.retries and (record.failure, record.failed_at) == (result.reason, result.step):
        reason = f"{reason}; the same error after the same step as before, so it is not tried again"
    elif record.retries < allowed:
        after = _RETRY_DELAY.after(record.retries + 1)
        reason = f"{reason}; retry {record.retries + 1} of {allowed} in {after:g} s"
        fields = {**failure, "retries": record.retries + 1}
        return NextState(JobState.QUEUED, reason, "retried", True, after, fields)
    elif allowed:
        reason = f"{reason}; it has been tried again {plural(allowed, 'time')}"
    return NextState(JobState.FAILED, reason, "failed", True, fields=failure)


def _failure_fields(result: AttemptResult | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {
        "exit_code": result.exit_code,
        "failure": result.reason,
        "failed_at": result.step,
        "last_lines": result.last_lines,
    }

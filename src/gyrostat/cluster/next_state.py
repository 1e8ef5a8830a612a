"""What becomes of a job when its host lets go of it: decided purely, carried out by `cluster`.

It has finished; or stopped as it was asked to, and waits or goes on elsewhere; or failed, and is tried again or not; or its
host was killed, and it goes on from its newest checkpoint.

Back-off after a failure doubles from a second to five minutes. An error that repeats is not tried a third time: the same words
after the same step are the script's own, and would come again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.records import Intent, JobRecord, JobState

_FIRST_S, _LONGEST_S = 1.0, 300.0
_POSTPONED_S = 30.0
_DEATHS = 3
"""So often it is started again after its host was killed, without having come farther."""


@dataclass(frozen=True)
class NextState:
    """The state that follows."""

    state: JobState
    reason: str
    kind: str | None
    """Of the event that tells it."""
    leaves: bool
    """The scheduler need not think of it any more, or not for a while."""
    after: float | None = None
    """Seconds until it is tried again."""
    fields: Mapping[str, Any] = field(default_factory=dict)


def fate_of(
    record: JobRecord,
    result: AttemptResult | None,
    *,
    entitled: bool,
    verdict: str | None = None,
    deaths: int = 0,
) -> NextState:
    """`record` is the job as it was, `result` what its host wrote (None: it was killed).

    `entitled`: the scheduler wants it to run. `verdict`: why it was made to stop for good. `deaths`: how often in a row its
    host was killed and it had come no farther, this time included.
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
        return NextState(JobState.FAILED, verdict, "failed", True, fields=_words(result))
    if record.intent is Intent.PAUSE:
        return NextState(JobState.PAUSED, "paused by its owner", "paused", True)
    if result is None and deaths > _DEATHS:
        reason = f"its host was killed {deaths} times, and it came no farther"
        return NextState(JobState.FAILED, reason, "failed", True, fields={"exit_code": 137})
    if result is not None and result.postponed:
        waits = JobState.SUSPENDED if record.attempts > 1 else JobState.QUEUED
        reason = f"{result.reason}; tried again in {_POSTPONED_S:g} s"
        return NextState(waits, reason, "postponed", True, _POSTPONED_S)
    if result is not None and not result.stopped:
        return _failed(record, result)
    killed = result is None
    kind = "restarted" if killed else None
    if entitled:
        reason = "its host was killed; from its newest checkpoint" if killed else record.reason
        return NextState(JobState.STARTING, reason, kind, False)
    reason = "its host was killed; it goes on from its newest checkpoint" if killed else record.reason
    return NextState(JobState.SUSPENDED, reason, kind, False)


def _failed(record: JobRecord, result: AttemptResult) -> NextState:
    allowed, reason, words = record.spec.retries, result.reason, _words(result)
    if not result.retriable:
        reason = f"{reason}; it would fail in the same way again"
    elif record.retries and (record.failure, record.failed_at) == (result.reason, result.step):
        reason = f"{reason}; the same error after the same step as before, so it is not tried again"
    elif record.retries < allowed:
        after = min(_FIRST_S * 2.0**record.retries, _LONGEST_S)
        reason = f"{reason}; retry {record.retries + 1} of {allowed} in {after:g} s"
        fields = {**words, "retries": record.retries + 1}
        return NextState(JobState.QUEUED, reason, "retried", True, after, fields)
    elif allowed:
        reason = f"{reason}; it has been tried again {allowed} times"
    return NextState(JobState.FAILED, reason, "failed", True, fields=words)


def _words(result: AttemptResult | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {
        "exit_code": result.exit_code,
        "failure": result.reason,
        "failed_at": result.step,
        "last_lines": result.last_lines,
    }

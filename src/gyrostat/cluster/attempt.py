"""The result of one attempt to run a job: what a host reports to its cluster, and what `next_state` decides on."""

from __future__ import annotations

import msgspec


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one attempt."""

    attempt: int
    finished: bool
    """The script has ended without an error."""
    stopped: bool
    """It checkpointed and stopped on request."""
    exit_code: int
    reason: str
    step: int
    started: bool
    """It began to train."""
    retriable: bool = True
    """False: it would fail in the same way again."""
    postponed: bool = False
    """It could not be started, for a reason outside the job; this does not count as a failure."""
    digest: str | None = None
    loss: float | None = None
    """Virtual worker 0's, of the last step."""
    last_lines: tuple[str, ...] = ()


def unstarted(attempt: int, reason: str) -> AttemptResult:
    """It could not be started, for a reason outside the job."""
    return AttemptResult(
        attempt=attempt,
        finished=False,
        stopped=False,
        exit_code=1,
        reason=reason,
        step=0,
        started=False,
        postponed=True,
    )


def not_taken(attempt: int) -> AttemptResult:
    """It had to stop before a host took it."""
    return AttemptResult(
        attempt=attempt,
        finished=False,
        stopped=True,
        exit_code=0,
        reason="cancelled before a host took it",
        step=0,
        started=False,
    )

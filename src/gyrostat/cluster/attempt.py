"""The result of one attempt to run a job: what a host reports to its cluster, and what `next_state` decides on."""

from __future__ import annotations

import msgspec


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an attempt."""

    attempt: int
    finished: bool
    """The script got to its end."""
    stopped: bool
    """It checkpointed and left because it was asked to."""
    exit_code: int
    reason: str
    step: int
    started: bool
    """It began to train."""
    retriable: bool = True
    """False: it would fail in the same way again."""
    postponed: bool = False
    """It could not be started, through no fault of its own; that does not count."""
    digest: str | None = None
    loss: float | None = None
    """Virtual worker 0's, of the last step."""
    last_lines: tuple[str, ...] = ()


def unstarted(attempt: int, reason: str) -> AttemptResult:
    """It could not even be begun, through no fault of its own."""
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
    """It was to stop before any host had it."""
    return AttemptResult(
        attempt=attempt,
        finished=False,
        stopped=True,
        exit_code=0,
        reason="called off before a host took it",
        step=0,
        started=False,
    )

"""The changes of a job's workers that are still to come, in order: those of `--schedule`, replacements of lost workers, and
changes that begin again after a recovery. A scheduled change or a replacement that could not be made is postponed: it is tried
again later, with increasing delays, until the step of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gyrostat.core.plural import plural
from gyrostat.job.control.instructions import Reconfiguration
from gyrostat.job.control.restarts import DELAY


def scheduled(first: int, entries: Sequence[tuple[int, int]]) -> list[Reconfiguration]:
    """The (step, workers) of a schedule that change the number of workers; `first` is the number at the beginning."""
    changes, workers = [], first
    for step, count in entries:
        if count != workers:
            reason = f"scheduled: {plural(count, 'worker')} from step {step} on"
            changes.append(Reconfiguration(workers=count, at_step=step, reason=reason))
            workers = count
    return changes


@dataclass
class Schedule:
    changes: list[Reconfiguration] = field(default_factory=list)
    postponed: Reconfiguration | None = None
    retry_at: float = 0.0
    """When the postponed change is tried again."""
    _given_up: int = 0
    """How often the postponed change could not be made."""

    def skip_to(self, step: int) -> None:
        """Training begins at `step`: of the entries before it, only the last one counts, and is due at once."""
        while len(self.changes) > 1 and (self.changes[1].at_step or 0) < step:
            self.changes.pop(0)
        if self.changes and (self.changes[0].at_step or 0) < step:
            late = self.changes.pop(0)
            self.put_first(Reconfiguration(workers=late.workers, reason=late.reason))

    def put_first(self, change: Reconfiguration) -> None:
        self.changes.insert(0, change)

    def postpone(self, change: Reconfiguration, now: float) -> None:
        """It could not be made: try again later."""
        self._given_up = self._given_up + 1 if change.retries else 1
        self.postponed = replace(change, at_step=None, retries=True)
        self.retry_at = now + DELAY.after(self._given_up)

    def pop(
        self, members: Sequence[int], step: int, now: float, devices: int | None = None
    ) -> Reconfiguration | None:
        """The next change that can begin now. Members that it removes and that have gone do not count; workers that were lost
        are not replaced if the job has no devices for them any more."""
        if (later := self.postponed) is not None:
            due = bool(self.changes) and ((self.changes[0].at_step or 0) <= step + 1)
            if not due and now < self.retry_at:
                return None
            self.postponed = None
            if not due:
                self.put_first(later)
        if not self.changes:
            return None
        change = self.changes.pop(0)
        if devices is not None and (change.is_replacement or change.retries):
            change = replace(change, workers=min(change.workers, max(devices, len(members))))
        return replace(change, without=tuple(member for member in change.without if member in members))

    def busy(self) -> str | None:
        """Why workers cannot be measured now."""
        retried = "busy: a change could not be made, and is tried again; retry"
        return None if self.postponed is None else retried

    def deadline(self) -> float | None:
        """When the postponed change is tried again."""
        return None if self.postponed is None else self.retry_at

    def next_is_awaited(self, step: int) -> bool:
        """The next change has a client that waits for it, or workers that wait at its step."""
        if not self.changes:
            return False
        change = self.changes[0]
        return change.request is not None or (change.at_step is not None and change.at_step <= step + 1)

"""The changes of a job's workers that are still to come, in order: those of `--schedule`, replacements of lost workers, and
changes that begin again after a recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gyrostat.job.control.instructions import Reconfiguration


def scheduled(first: int, entries: Sequence[tuple[int, int]]) -> list[Reconfiguration]:
    """The (step, workers) of a schedule that change the number of workers; `first` is the number at the beginning."""
    changes, workers = [], first
    for step, count in entries:
        if count != workers:
            reason = f"scheduled: {count} workers from step {step} on"
            changes.append(Reconfiguration(workers=count, at_step=step, reason=reason))
            workers = count
    return changes


@dataclass
class Schedule:
    changes: list[Reconfiguration] = field(default_factory=list)

    def skip_to(self, step: int) -> None:
        """Training begins at `step`: of the entries before it, only the last one counts, and is due at once."""
        while len(self.changes) > 1 and (self.changes[1].at_step or 0) < step:
            self.changes.pop(0)
        if self.changes and (self.changes[0].at_step or 0) < step:
            late = self.changes.pop(0)
            self.put_first(Reconfiguration(workers=late.workers, reason=late.reason))

    def put_first(self, change: Reconfiguration) -> None:
        self.changes.insert(0, change)

    def pop(self, members: Sequence[int]) -> Reconfiguration | None:
        """The next change. Members that it removes and that have gone do not count."""
        if not self.changes:
            return None
        change = self.changes.pop(0)
        return replace(change, without=tuple(member for member in change.without if member in members))

    def next_is_awaited(self, step: int) -> bool:
        """The next change has a client that waits for it, or workers that wait at its step."""
        if not self.changes:
            return False
        change = self.changes[0]
        return change.request is not None or (change.at_step is not None and change.at_step <= step + 1)

"""Decides at which boundary a checkpoint is taken. Pure.

One is taken when it is requested, every `every` steps, and every `interval_s` seconds (`CheckpointTimer`). None is taken
while one is being written: all requests of that time become one checkpoint at the first boundary where all workers know that
the writer is free, so there is no queue. Every worker gives its `CheckpointSchedule` the same facts, so all agree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointSchedule:
    """When the next checkpoint is due. Equal on all workers."""

    every: int = 0
    """Steps between checkpoints; 0: only on request."""
    last_step: int = 0
    """The boundary of the newest checkpoint: another one there would be equal."""
    writing: bool = False
    """One is being written."""
    wanted: bool = False
    """One is due when the writer is free."""

    def boundary(self, step: int, *, asked: bool, written: bool) -> bool:
        """Whether to take one at this boundary. `asked`: one was requested. `written`: the last one is complete."""
        if written:
            self.writing = False
        if asked or (self.every > 0 and step % self.every == 0):
            self.wanted = step != self.last_step
        if self.writing or not self.wanted:
            return False
        self.writing = True
        self.took(step)
        return True

    @property
    def pending(self) -> bool:
        """One is being written, or due: no other is needed before."""
        return self.writing or self.wanted

    def took(self, step: int) -> None:
        """A checkpoint is taken at this boundary; it answers all requests."""
        self.wanted, self.last_step = False, step


_COST = 0.01
"""The share of the time for which training may pause because of checkpoints by time."""


@dataclass
class CheckpointTimer:
    """When a checkpoint by time is due.

    Clocks of workers differ, so only the main worker's counts: it requests a checkpoint, which all workers take at the boundary
    where they know it.
    """

    interval_s: float = 0.0
    """Seconds between checkpoints; 0: none by time."""
    last: float | None = None
    """When the newest one was taken, or training began."""
    stall_s: float = 0.0
    """Seconds for which training paused for the newest one."""

    def due(self, now: float) -> bool:
        """Whether one is to be requested. The first call begins the first interval."""
        if self.last is None:
            self.last = now
        return self.interval_s > 0 and now - self.last >= max(self.interval_s, self.stall_s / _COST)

    def took(self, now: float) -> None:
        """A checkpoint is taken, for whatever reason."""
        self.last = now

    def waited(self, now: float) -> float:
        """Seconds since the newest one."""
        return 0.0 if self.last is None else now - self.last

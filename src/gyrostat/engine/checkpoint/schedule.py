"""Decides at which boundary a checkpoint is taken. Pure.

One is taken when it is requested, and every `every` steps. None is taken while one is being written: all requests of that
time become one checkpoint at the first boundary where all workers know that the writer is free, so there is no queue. Every
worker gives its `CheckpointSchedule` the same facts, so all decide alike.
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

    def took(self, step: int) -> None:
        """A checkpoint is taken at this boundary; it answers all requests."""
        self.wanted, self.last_step = False, step

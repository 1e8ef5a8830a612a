"""At which boundary a checkpoint is taken: a pure decision.

One is taken when it is asked for, and every so many steps. While one is being written none is taken: whatever is asked
for meanwhile, however often, is one checkpoint at the first boundary where all workers know that the writer is free.
So there is never a queue. Every worker feeds its `CheckpointSchedule` with the same facts, and all decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointSchedule:
    """Whose turn it is, as every worker knows it."""

    every: int = 0
    """One every so many steps; 0 means only when asked for."""
    last_step: int = 0
    """The boundary of the newest one: nothing has happened since if we are still there."""
    writing: bool = False
    wanted: bool = False

    def boundary(self, step: int, *, asked: bool, written: bool) -> bool:
        """Whether to take one here. `written`: the last one is done; `asked`: somebody wants one."""
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
        """One is taken here, which is all that was asked for."""
        self.wanted, self.last_step = False, step

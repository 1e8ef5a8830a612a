"""Who is silent: stopped, hung in the kernel, or cut off. Decided purely; the leader asks, and kills.

A process that is killed is missed at once, for its agent sees it go. One that is stopped is not: its connections stay open, and
all others wait. So every worker is asked now and then whether it is there, and a thread of its own answers, whatever the script
is doing. Only a script that holds the interpreter's lock for as long as the patience lasts is taken for silent, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Heartbeats:
    """`patience`: seconds after which a worker that has not answered is given up; 0: never."""

    patience: float
    _heard: dict[int, float] = field(default_factory=dict)
    _asked: float = float("-inf")
    _looked: float = float("-inf")

    @property
    def _every(self) -> float:
        return self.patience / 4

    def heard(self, member: int, now: float) -> None:
        """It said something."""
        if member in self._heard:
            self._heard[member] = now

    def look(self, members: Sequence[int], now: float) -> tuple[bool, list[int]]:
        """Whether they are to be asked now, and who has been silent for too long."""
        if self.patience <= 0:
            return False, []
        slept = now - self._looked > self.patience / 2  # it was us who did not listen
        self._heard = {
            member: now if slept or member not in self._heard else self._heard[member] for member in members
        }
        self._looked = now
        silent = [member for member, at in self._heard.items() if now - at > self.patience]
        asks = now - self._asked >= self._every
        if asks:
            self._asked = now
        return asks, silent

    def deadline(self) -> float | None:
        """When to look again."""
        return None if self.patience <= 0 or not self._heard else self._asked + self._every

"""Recovery from lost workers, on the coordinator's side: which were lost, and when the survivors look for each other.

The survivors connect as a generation of their own and redo the lost workers' part of the pass that was running; the worker's
side is `gyrostat.engine.reconfigure.recovery`. Workers that are lost during a recovery are added to it, and it begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gyrostat.core.phase import ReconfigurationPhase
from gyrostat.core.plural import numbered
from gyrostat.job.control.generations import Generations
from gyrostat.job.control.instructions import Reconfiguration, SurvivorsGoOn

_HEAR_OF_DEATH_S = 0.5
"""After a worker has lost a peer, the exit of the peer is usually reported within this time."""


@dataclass
class RecoveryState:
    """The losses that are being recovered from."""

    lost: tuple[int, ...] = ()
    reason: str = ""
    missed: int = 0
    """How many workers have to be replaced: lost without having been asked to leave, or not yet replaced before."""
    redone: int = 0
    paused: float = 0.0
    deadline: float | None = None
    """When the survivors look for each other, though nobody has said which worker was lost."""
    broken: tuple[int, float] | None = None
    """The generation to which workers could not connect, and when the change to it is cancelled."""
    left: set[int] = field(default_factory=set)
    """Workers that have left in good order, at a fence."""

    def peer_lost(self, generation: int, generations: Generations, now: float) -> None:
        """A worker has lost a peer. Usually the peer's exit is reported next; if not, all survivors connect anew. If it was
        lost while workers connected to the next generation, only that change is over."""
        if self._prepares(generation, generations):
            self.broken = self.broken or (generation, now + _HEAR_OF_DEATH_S)
            return
        plan = generations.plan if generations.phase is ReconfigurationPhase.RECOVERING else None
        newest = generations.current if plan is None else plan.generation
        if generation >= newest and self.deadline is None:
            self.deadline = now + _HEAR_OF_DEATH_S

    def take_broken(self, generations: Generations, now: float) -> bool:
        """Whether the change that is being prepared is to be cancelled now."""
        if self.broken is None or now < self.broken[1]:
            return False
        (generation, _), self.broken = self.broken, None
        return self._prepares(generation, generations)

    @staticmethod
    def _prepares(generation: int, generations: Generations) -> bool:
        connects = generations.phase is ReconfigurationPhase.CONNECTING
        return connects and generations.plan is not None and generations.plan.generation == generation

    def add(self, gone: Sequence[int], leaving: Sequence[int], reason: str) -> None:
        """These members are lost; `leaving` were about to leave anyway."""
        self.lost = (*self.lost, *gone)
        self.missed += sum(member not in leaving for member in gone)
        self.reason = self.reason or reason

    def complete(self, generations: Generations) -> SurvivorsGoOn:
        """All survivors are connected."""
        assert generations.plan is not None
        members = len(generations.members)
        return SurvivorsGoOn(
            self.lost,
            self.reason,
            generations.step,
            members + len(self.lost),
            members,
            self.redone,
            self.paused,
            generations.plan.waits,
        )

    def replacement(self, members: int) -> Reconfiguration:
        """The change that replaces the lost workers."""
        reason = f"in place of {numbered('worker', self.lost)}"
        return Reconfiguration(workers=members + self.missed, reason=reason)

    def clear(self) -> None:
        self.lost, self.reason, self.missed, self.redone, self.paused = (), "", 0, 0, 0.0

"""The response to slow workers: remove one, let one come back, or distribute virtual workers by speed. Decided purely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gyrostat.job.control.generations import Generations
from gyrostat.job.control.instructions import Reconfiguration, StragglerNoticed
from gyrostat.job.diagnostics.stragglers import Pace, Reaction, shares
from gyrostat.job.processes.protocol import StepReport


@dataclass
class StragglerResponse:
    pace: Pace = field(default_factory=Pace)
    """The speed of each worker, and the policy."""
    _last: float = float("-inf")
    """When it last requested a change."""
    _removed: int = 0
    """Stragglers so far."""
    _comes_back_at: float = float("inf")

    def observe(self, steps: Sequence[StepReport], generations: Generations) -> list[StragglerNoticed]:
        """Take in the workers' times of complete steps. Returns the stragglers that are new."""
        return [StragglerNoticed(straggler) for straggler in self.pace.add(_times(steps, generations))]

    def decide(self, generations: Generations, now: float) -> Reconfiguration | None:
        """The change to make now; at most one per `pause_s` of the policy."""
        policy, recent, members = self.pace.policy, self.pace.recent(), generations.members
        if now - self._last < policy.pause_s or set(recent) != set(members):
            return None
        change: Reconfiguration | None = None
        if policy.reaction is Reaction.REMOVE and (slow := self.pace.stragglers()):
            worst = max(slow, key=lambda straggler: straggler.seconds)
            change = Reconfiguration(workers=len(members) - 1, reason=str(worst), without=(worst.member,))
            self._comes_back_at = policy.comes_back_at(now, self._removed)
            self._removed += 1
        elif policy.reaction is Reaction.REMOVE and now >= self._comes_back_at:
            self._comes_back_at = float("inf")
            reason = "the place of a worker that was removed for being slow is tried again"
            change = Reconfiguration(workers=len(members) + 1, reason=reason)
        elif policy.reaction is Reaction.REPLACE:
            counts, seconds = generations.counts, [recent[member] for member in members]
            if wanted := shares(generations.virtual_workers, counts, seconds, policy.gain):
                speeds = ", ".join(f"{1e3 * time:.1f}" for time in seconds)
                reason = f"workers take {speeds} ms for a virtual worker: {wanted} instead of {counts} of them each"
                change = Reconfiguration(workers=len(members), reason=reason, counts=tuple(wanted))
        if change is not None:
            self._last = now
        return change


def _times(steps: Sequence[StepReport], generations: Generations) -> list[dict[int, float]]:
    """Each member's seconds per virtual worker, of steps in the generation that is in force."""
    counts = generations.counts
    return [
        {
            member: seconds / count
            for member, seconds, count in zip(generations.members, step.busy, counts, strict=True)
        }
        for step in steps
        if step.step > generations.began_at and len(step.busy) == len(counts)
    ]

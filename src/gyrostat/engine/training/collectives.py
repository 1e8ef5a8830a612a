"""What workers do together besides the passes, and the count of all that they have completed together.

The reduction of a pass is one collective, an `exchange` is one. Every worker counts those that it has completed and keeps the
payloads of the last one. If a worker dies in the middle of one, another may have completed it: then its payloads are what
the others missed (`engine/reconfigure/recovery.py`). Otherwise the survivors do it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gyrostat.core.errors import PeerLost
from gyrostat.core.progress import Progress
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.plan import StepPlan


class CollectiveLog:
    """The collectives that this worker has completed."""

    def __init__(self) -> None:
        self.completed = 0
        """Since the job began."""
        self.last: Sequence[bytes] = []
        """The payloads of all workers in the last one: for a worker that missed it."""
        self.last_was_pass = False

    def add(self, payloads: Sequence[bytes], *, was_pass: bool = False) -> None:
        self.completed += 1
        self.last, self.last_was_pass = payloads, was_pass

    def join_at(self, completed: int) -> None:
        """A newcomer counts as if it had been there from the beginning."""
        self.completed = completed


class PeerRecovery(Protocol):
    """What to do when a worker is lost in the middle of a collective."""

    available: bool
    """The other workers can go on without one that is lost."""

    def recover(self, lost: PeerLost, plan: StepPlan | None) -> list[bytes] | None:
        """Block until the survivors can go on together. `plan`: of the pass that was interrupted, if it was a pass.

        Returns the payloads of the interrupted collective if some survivor has completed it; of a pass, the sums are in place,
        too. None: it is to be done again, a pass after the relocated virtual workers have run here.
        """


class NoRecovery:
    """The job starts again from a checkpoint, or fails."""

    available = False

    def recover(self, lost: PeerLost, plan: StepPlan | None) -> list[bytes] | None:
        raise lost


class Collectives:
    """Exchanges among all workers, repeated among the survivors if a worker is lost."""

    def __init__(self, generation: CurrentGeneration, log: CollectiveLog, recovery: PeerRecovery) -> None:
        self._generation, self._log, self._recovery = generation, log, recovery

    def exchange(
        self, kind: str, progress: Progress, payload: Callable[[], bytes], *, once: bool = False
    ) -> list[bytes]:
        """Give every worker everybody's payload. `payload` is called again if virtual workers have been relocated meanwhile.

        `once`: survivors do not repeat it if a worker is lost, because not all of them would; the result is empty then.
        """
        while True:
            try:
                payloads = self._generation.group.exchange(kind, progress, payload())
            except PeerLost as lost:
                missed = self._recovery.recover(lost, None)
                if missed is None and once:
                    return []
                if missed is None:
                    continue
                payloads = missed
            self._log.add(payloads)
            return payloads

    def minimum(self, kind: str, progress: Progress, mine: Callable[[], int]) -> int:
        """The smallest of all workers' numbers."""
        everyone = self.exchange(kind, progress, lambda: mine().to_bytes(8, "little", signed=True))
        return min(int.from_bytes(number, "little", signed=True) for number in everyone)

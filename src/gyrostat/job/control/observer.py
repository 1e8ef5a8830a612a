"""Who looks on while a job runs: the port between `launcher` and whatever shows or keeps what happens."""

from __future__ import annotations

from typing import Protocol

from gyrostat.job.control.instructions import Reconfiguration, ReconfigurationDone, SurvivorsGoOn
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.worker_tracker import JobFailure
from gyrostat.job.diagnostics.stragglers import Straggler
from gyrostat.job.diagnostics.watchdog import Standstill
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import FromWorker


class Observer(Protocol):
    """Called from the launcher's loop: must be quick, and waits for nothing."""

    def heard(self, worker: int, message: FromWorker) -> None:
        """A worker reported something."""

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        """A worker printed a line."""

    def resized(self, done: ReconfigurationDone) -> None:
        """The job runs on another number of workers."""

    def refused(self, change: Reconfiguration, reason: str) -> None:
        """A change was asked for, and will not be made."""

    def noticed(self, straggler: Straggler) -> None:
        """A worker has become slower than the others."""

    def recovered(self, rescued: SurvivorsGoOn) -> None:
        """A worker has died; the others go on."""

    def stood_still(self, found: Standstill) -> None:
        """No step has been completed for too long."""

    def died(self, failure: JobFailure, wait: float) -> None:
        """A worker has died; in so many seconds the job starts again from its newest checkpoint."""

    def ticked(self) -> float | None:
        """Called after every turn of the loop. Returns in how many seconds it wants to be called at the
        latest.
        """

    def over(self, outcome: Outcome) -> None:
        """The run is over."""


class NullObserver:
    """Looks away."""

    def heard(self, worker: int, message: FromWorker) -> None:
        pass

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        pass

    def resized(self, done: ReconfigurationDone) -> None:
        pass

    def refused(self, change: Reconfiguration, reason: str) -> None:
        pass

    def noticed(self, straggler: Straggler) -> None:
        pass

    def recovered(self, rescued: SurvivorsGoOn) -> None:
        pass

    def stood_still(self, found: Standstill) -> None:
        pass

    def died(self, failure: JobFailure, wait: float) -> None:
        pass

    def ticked(self) -> float | None:
        return None

    def over(self, outcome: Outcome) -> None:
        pass

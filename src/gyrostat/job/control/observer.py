"""`Observer`: the port between a running job and what displays or records its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gyrostat.core.events import Event
from gyrostat.job.control.instructions import Reconfiguration, ReconfigurationDone, SurvivorsGoOn
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.worker_tracker import JobFailure
from gyrostat.job.diagnostics.stragglers import Straggler
from gyrostat.job.diagnostics.watchdog import Standstill
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import FromWorker


class Observer(Protocol):
    """Called from the event loop: must be quick, and must not block."""

    def heard(self, worker: int, message: FromWorker) -> None:
        """A worker reported something."""

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        """A worker printed a line."""

    def resized(self, done: ReconfigurationDone) -> None:
        """The job runs on another number of workers."""

    def refused(self, change: Reconfiguration, reason: str) -> None:
        """A change was requested, and will not be made."""

    def noticed(self, straggler: Straggler) -> None:
        """A worker has become slower than the others."""

    def worker_died(self, worker: int, how: str, step: int, evidence: Sequence[str]) -> None:
        """A worker has died after this step, and the others will go on: `recovered` follows, unless it had not joined yet."""

    def recovered(self, done: SurvivorsGoOn) -> None:
        """A worker has died; the others go on."""

    def happened(self, event: Event) -> None:
        """An event of a job with parameter servers: all of them come here."""

    def stood_still(self, found: Standstill) -> None:
        """No step has been completed for too long."""

    def died(self, failure: JobFailure, wait: float, checkpoint: int | None) -> None:
        """A worker has died; in `wait` seconds the job restarts from its newest checkpoint, of step `checkpoint`.

        None: from the beginning, for it has none.
        """

    def ticked(self) -> float | None:
        """Called after every turn of the loop. Returns the seconds after which it must be called again; None: no limit."""

    def over(self, outcome: Outcome) -> None:
        """The run is over."""


class NullObserver:
    """Ignores all events."""

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

    def worker_died(self, worker: int, how: str, step: int, evidence: Sequence[str]) -> None:
        pass

    def recovered(self, done: SurvivorsGoOn) -> None:
        pass

    def happened(self, event: Event) -> None:
        pass

    def stood_still(self, found: Standstill) -> None:
        pass

    def died(self, failure: JobFailure, wait: float, checkpoint: int | None) -> None:
        pass

    def ticked(self) -> float | None:
        return None

    def over(self, outcome: Outcome) -> None:
        pass

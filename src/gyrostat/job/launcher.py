"""Runs one job on this machine: starts its workers, listens, ends them all, and says what came of it.

`run_job` is the whole of it. The job is led (`leader`) in the same process whose loop (`loop`) hears its workers; several
machines need an `agent` each instead. However it ends, by an exception too, no worker is left running.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gyrostat.core.evidence import Evidence
from gyrostat.core.job import Assignment
from gyrostat.job.door import Door, Request, Visitor
from gyrostat.job.leader import Leader, Record
from gyrostat.job.loop import Loop
from gyrostat.job.observer import Nobody, Observer, Stream
from gyrostat.job.outcome import Outcome
from gyrostat.job.output import LogFiles
from gyrostat.job.protocol import FromWorker, Seat
from gyrostat.job.request import RunRequest
from gyrostat.job.signals import SignalQueue, caught
from gyrostat.job.start import ForkParent, WorkerSource
from gyrostat.job.tracefile import join_traces

__all__ = ["RunRequest", "run_job"]


def run_job(
    request: RunRequest,
    *,
    parent: WorkerSource | None = None,
    observer: Observer | None = None,
    forward_signals: bool = False,
) -> Outcome:
    """Run a job to its end, good or bad; `Outcome.check` raises if it was bad.

    `parent` is a fork parent that is running already (it serves one job at a time); without one, one is
    started and ended. `forward_signals` takes over SIGINT, SIGTERM, SIGHUP and SIGUSR1 of this process
    meanwhile.
    """
    request.check()
    observer = observer or Nobody()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(caught()) if forward_signals else None
        source = parent if parent is not None else stack.enter_context(ForkParent())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyrostat-")))
        machine = _OneMachine(request, source, observer, signals, directory)
        stack.callback(machine.close)
        outcome = machine.run()
        if request.trace is not None:
            join_traces(machine.traces(machine.attempts), request.trace)
    observer.over(outcome)
    return outcome


class _OneMachine:
    """A leader whose hands and ears are in the same process: implements `leader.Hands` and `crew.Ears`."""

    def __init__(
        self,
        request: RunRequest,
        source: WorkerSource,
        observer: Observer,
        signals: SignalQueue | None,
        directory: Path,
    ) -> None:
        self._request, self._observer, self._directory = request, observer, directory
        self.attempts = 0
        self._leader = Leader(request, self, observer)
        self._loop = Loop(
            source,
            self,
            on_signal=self._leader.signalled,
            on_request=self._asked,
            boxes=directory,
            signals=signals,
            door=Door(request.name) if request.name else None,
            logs=LogFiles(request.log_dir) if request.log_dir else None,
        )

    def run(self) -> Outcome:
        self._leader.begin()
        self._loop.crew.take_exits()  # those that came while others were started have been read, and wake nobody up
        while True:
            self._leader.tick()
            if self._leader.outcome is not None:
                return self._leader.outcome
            wish = self._observer.ticked()
            self._loop.turn(self._leader.deadline(), None if wish is None else time.monotonic() + wish)

    def close(self) -> None:
        self._leader.close()
        self._loop.close()

    # Ears.

    def heard(self, seat: Seat, message: FromWorker) -> None:
        self._leader.heard(seat, message)

    def printed(self, seat: Seat, stream: Stream, line: str) -> None:
        self._observer.printed(seat.member, stream, line)

    def exited(self, seat: Seat, code: int, evidence: Evidence) -> None:
        self._leader.exited(seat, code, evidence)

    def _asked(self, request: Request, visitor: Visitor) -> None:
        self._leader.asked(request, visitor)

    # Hands.

    def start(self, seat: Seat, assignment: Assignment) -> None:
        self.attempts = seat.attempt
        self._loop.crew.start(seat, self._request.spec(assignment))

    def tell(self, seat: Seat, message: msgspec.Struct) -> None:
        self._loop.crew.tell(seat, message)

    def signal(self, seat: Seat, number: int) -> None:
        self._loop.crew.signal(seat, number)

    def store(self, attempt: int, generation: int) -> str:
        return str(self.traces(attempt) / f"store-{generation}")

    def traces(self, attempt: int) -> Path:
        path = self._directory / f"attempt-{attempt}"
        path.mkdir(exist_ok=True)
        return path

    def keep(self, record: Callable[[], Record]) -> bool:
        """There is no other leader: the job ends with this process."""
        return True

"""In the worker: runs the user's program, and records what it reports to its supervisor.

`python -m gyrostat.job.chaos.inside DIRECTORY script|module PROGRAM ARGS…`
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyrostat.core.job import ReductionChoice
from gyrostat.core.placement import Placement
from gyrostat.engine.script import session
from gyrostat.engine.supervisor import Supervisor
from gyrostat.job import environment
from gyrostat.job.chaos.record import (
    RecordWriter,
    RecoveryNoted,
    StepDone,
    TrainingBegan,
    WorkerEnd,
    WorkerStarted,
    WorkerTrains,
)
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.worker import run_program


class RecordingSupervisor:
    """Records some of the calls to a supervisor, and forwards all of them."""

    def __init__(self, records: RecordWriter, inner: Supervisor) -> None:
        self._records, self._inner, self._trains = records, inner, False
        records.write(WorkerStarted(time.monotonic(), os.getpid(), environment.rank()))

    def started(
        self,
        step: int,
        resumed_from: str | None,
        refused: list[str],
        virtual_workers: int,
        reduction: ReductionChoice,
        compatibility: Mapping[str, str],
    ) -> None:
        self._records.write(TrainingBegan(time.monotonic(), step, resumed_from))
        self._inner.started(step, resumed_from, refused, virtual_workers, reduction, compatibility)

    def runs(self, step: int, rank: int, number: int, samples: Sequence[int] | None) -> None:
        if not self._trains:
            self._trains = True
            self._records.write(WorkerTrains(time.monotonic(), os.getpid()))
        self._inner.runs(step, rank, number, samples)

    def stepped(
        self, step: int, epoch: int, loss: float | None, samples: int, busy: Sequence[float] = ()
    ) -> None:
        self._records.write(StepDone(time.monotonic(), step, loss, samples))
        self._inner.stepped(step, epoch, loss, samples, busy)

    def recovered(self, generation: int, placement: Placement, again: int, paused: float) -> None:
        self._records.write(RecoveryNoted(time.monotonic(), generation, again, paused))
        self._inner.recovered(generation, placement, again, paused)

    def finished(self, step: int, digest: str) -> None:
        self._records.write(WorkerEnd(time.monotonic(), step, digest))
        self._inner.finished(step, digest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def main() -> None:
    directory, kind, name, *args = sys.argv[1:]
    records = RecordWriter(Path(directory))
    session.supervise(lambda inner: RecordingSupervisor(records, inner))
    run_program(Program(name=name, module=kind == "module", args=tuple(args)))


if __name__ == "__main__":
    main()

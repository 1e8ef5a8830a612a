"""Runs one configuration of a script, in one part or two, and records its trace.

Every run has a temporary checkpoint directory, so that a script that names one neither resumes from another run nor changes
its user's checkpoints.
"""

from __future__ import annotations

import tempfile
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gyrostat.core.job import (
    CheckpointPolicy,
    Determinism,
    DevicePool,
    Probe,
    ReductionOrder,
    TrainingOptions,
)
from gyrostat.job.control.observer import NullObserver, Observer
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import FromWorker, Program, StepReports
from gyrostat.job.processes.start import WorkerSource
from gyrostat.job.verify.compare import TracedRun
from gyrostat.job.verify.plan import Configuration
from gyrostat.job.verify.trace import divergence, join, trace_of
from gyrostat.job.verify.verdict import FailedRun

_KEPT_LINES = 20


class VerifyObserver(Observer, Protocol):
    """The observer of a verification: that of each run, which is also called when runs start and end."""

    def run_started(self, name: str, number: int | None, total: int | None, steps: int | None) -> None:
        """A run has started: number `number` of about `total`, or None for one that explains a difference. `steps`: its number
        of steps, if known.
        """

    def run_ended(self, run: TracedRun, first: TracedRun) -> None:
        """A run that is compared has ended. `first`: the first of these runs."""


class NullVerifyObserver(NullObserver):
    """Ignores everything."""

    def run_started(self, name: str, number: int | None, total: int | None, steps: int | None) -> None:
        pass

    def run_ended(self, run: TracedRun, first: TracedRun) -> None:
        pass


class RunFailed(Exception):
    """The script failed, or a signal stopped it: verification cannot continue."""

    def __init__(self, failed: FailedRun) -> None:
        super().__init__(str(failed.outcome.failure))
        self.failed = failed


@dataclass
class _RunRecorder(NullObserver):
    """Records what is not in an `Outcome`, and forwards everything."""

    observer: VerifyObserver
    epochs: list[int] = field(default_factory=list)
    """The epoch of every step."""
    output: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, StepReports):
            self.epochs += [step.epoch for step in message.steps]
        self.observer.heard(worker, message)

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        self.output.append(f"worker {worker} │ {line}")
        self.observer.printed(worker, stream, line)

    def ticked(self) -> float | None:
        return self.observer.ticked()

    def over(self, outcome: Outcome) -> None:
        self.observer.over(outcome)


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs configurations of one program."""

    program: Program
    directory: Path
    parent: WorkerSource
    observer: VerifyObserver
    forward_signals: bool
    reduction: ReductionOrder | None = None
    pool: DevicePool | None = None
    """The device types of a heterogeneous job; None for an elastic one."""

    def run(
        self, configuration: Configuration, probe: Probe, *, until: int | None, threads: int
    ) -> tuple[TracedRun, list[int]]:
        """Run the configuration until `until` steps are done. Also returns the epoch of every step."""
        recorder = _RunRecorder(self.observer)
        cut = configuration.cut
        early = until is not None and cut is not None and until <= cut
        with tempfile.TemporaryDirectory(prefix="gyrostat-verify-") as checkpoints:
            request = RunRequest(
                program=self.program,
                placement=configuration.placement,
                options=TrainingOptions(
                    threads=threads,
                    reduction=self.reduction,
                    determinism=Determinism.ELASTIC if self.pool is None else Determinism.HETEROGENEOUS,
                    pool=self.pool,
                    reference=configuration.reference,
                    checkpoint=CheckpointPolicy(directory=checkpoints, resume=False),
                    probe=probe,
                    stop_after=until if cut is None or early else cut,
                ),
                cwd=self.directory,
            )
            first = self._part(request, configuration, recorder)
            trace, seconds = trace_of(first), first.total_seconds
            if configuration.resumed_on is not None and not early and first.stopped:
                request = replace(
                    request,
                    placement=configuration.resumed_on,
                    options=replace(
                        request.options,
                        checkpoint=CheckpointPolicy(directory=checkpoints),
                        stop_after=until,
                    ),
                )
                second = self._part(request, configuration, recorder)
                trace, seconds = join(trace, trace_of(second)), seconds + second.total_seconds
        return TracedRun(configuration=configuration, trace=trace, seconds=seconds), recorder.epochs

    def _part(self, request: RunRequest, configuration: Configuration, recorder: _RunRecorder) -> Outcome:
        outcome = run_job(
            request, parent=self.parent, observer=recorder, forward_signals=self.forward_signals
        )
        stopped = outcome.stopped_by is not None  # even if the run finished after that
        if stopped or not (outcome.ok or divergence(outcome)):
            raise RunFailed(
                FailedRun(configuration=configuration, outcome=outcome, output=tuple(recorder.output))
            )
        return outcome

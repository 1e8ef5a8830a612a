"""Measures the throughput of a script on this device by batch size, and the cost of exchanging gradients (VirtualFlow §5.1.1).

The script runs as one job per batch size, on one worker, for some steps. It is not changed: its loaders use the measured batch
size instead of the `batch_size` given to `job.dataloader` or `job.shards`, and it has one virtual worker per worker. The cost
of the exchange is the additional time of a step on several workers, with a single sample each, so that it includes as little
computation as possible. The result is a `core.profile.Profile`, which the planner reads.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from gyrostat.core.errors import ScriptFailed, UsageError
from gyrostat.core.job import TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.core.profile import Points, Profile, Speed
from gyrostat.job import environment
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.worker_tracker import FailureCause
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import FromWorker, Program, Started
from gyrostat.job.processes.start import WorkerSource

_WARM_UP = 3
"""Steps that are not measured: buckets are rebuilt, allocators fill their pools."""
_MIN_STEPS = 3
"""The minimum number of measured steps."""


@dataclass(frozen=True, kw_only=True)
class DeviceProfileRequest:
    """The script, and the batch sizes and numbers of workers to measure."""

    program: Program
    batches: tuple[int, ...]
    workers: tuple[int, ...] = (2,)
    """The numbers of workers for which the exchange is measured; empty: it is not measured."""
    steps: int = 20
    threads: int = 1
    device_type: str | None = None
    """The type of this device; None: the detected one."""
    workload: str | None = None
    """The name of the workload; None: the script's name."""

    def check(self) -> None:
        """Raise `UsageError` for what cannot be measured, before any process is started."""
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise UsageError(f"batch sizes must be distinct numbers from 1 on; got {list(self.batches)}")
        if any(workers < 2 for workers in self.workers) or len(set(self.workers)) < len(self.workers):
            raise UsageError(
                f"the numbers of workers for the exchange must be distinct and at least 2; got {list(self.workers)}"
            )
        if self.steps < _MIN_STEPS:
            raise UsageError(f"at least {_MIN_STEPS} steps are measured, got {self.steps}")

    def run(self, batch: int, workers: int = 1) -> RunRequest:
        return RunRequest(
            program=self.program,
            placement=Placement.even(workers, workers),
            options=TrainingOptions(batch_size=batch, threads=self.threads, stop_after=_WARM_UP + self.steps),
        )


def profile_device(
    request: DeviceProfileRequest, parent: WorkerSource, report: Callable[[str], None] = lambda line: None
) -> Profile:
    """Measure; `report` is called with a line for every result."""
    request.check()
    observer = _DeviceObserver()
    rates: list[tuple[int, float]] = []
    for batch in sorted(request.batches):
        outcome = run_job(request.run(batch), parent=parent, observer=observer)
        if rates and _out_of_memory(outcome):
            report(f"batch {batch} does not fit: {outcome.failure}; larger ones are skipped")
            break
        rates.append((batch, batch / step_seconds(outcome, batch)))
        report(f"batch {batch}: {rates[-1][1]:,.1f} samples/s")
    exchange = _exchange(request, parent, report) if request.workers else ()
    name = request.workload or os.path.splitext(os.path.basename(request.program.name))[0]
    return Profile(name, {request.device_type or observer.device_type(): Speed(tuple(rates), exchange)})


def step_seconds(outcome: Outcome, batch: int) -> float:
    """The median step of a run with micro-batches of `batch` samples."""
    outcome.check()
    if len(outcome.step_times) < _WARM_UP + _MIN_STEPS:
        raise UsageError(
            f"with batches of {batch} the script ended after {len(outcome.step_times)} steps; at least "
            f"{_WARM_UP + _MIN_STEPS} are needed: give it more data or epochs"
        )
    per_step = outcome.samples / len(outcome.step_times) / outcome.virtual_workers
    if per_step < 0.9 * batch:
        raise UsageError(
            f"steps have {per_step:.1f} samples on average, not {batch}: "
            "the dataset is too small for this batch size: give smaller --batches or more data"
        )
    times = outcome.step_times[_WARM_UP - 1 :]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def _exchange(request: DeviceProfileRequest, parent: WorkerSource, report: Callable[[str], None]) -> Points:
    """Seconds per step by number of workers: the additional time compared with one worker."""
    batch = 1
    alone = run_job(request.run(batch), parent=parent)
    if alone.failure is not None:  # batch norm, for example, needs more than one sample
        batch = min(request.batches)
        alone = run_job(request.run(batch), parent=parent)
    points = []
    for workers in sorted(request.workers):
        together = run_job(request.run(batch, workers), parent=parent)
        seconds = max(0.0, step_seconds(together, batch) - step_seconds(alone, batch))
        points.append((workers, seconds))
        report(f"exchange among {workers} workers: {1e3 * seconds:.2f} ms per step (batches of {batch})")
    return tuple(points)


def _out_of_memory(outcome: Outcome) -> bool:
    """Reported by torch, or killed by the kernel."""
    failure = outcome.failure
    return failure is not None and (
        "OutOfMemoryError" in failure.summary
        or "can't allocate memory" in failure.summary
        or (failure.cause is FailureCause.KILLED and "SIGKILL" in failure.summary)
    )


class _DeviceObserver(NullObserver):
    """Keeps the device type that the workers report."""

    def __init__(self) -> None:
        self._compatibility: dict[str, str] = {}

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, Started):
            self._compatibility = message.compatibility

    def device_type(self) -> str:
        from gyrostat.engine.numerics.determinism import cpu_type  # imports torch

        if not self._compatibility:
            raise ScriptFailed(
                "the script ended before it began to train, so its device type is unknown; give it with --type"
            )
        return self._compatibility.get("gpu") or cpu_type(environment.variables()) or "cpu"

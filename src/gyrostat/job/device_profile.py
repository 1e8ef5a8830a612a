"""How fast this machine's device runs a script, by batch size, and what exchanging gradients costs (VirtualFlow §5.1.1).

The script runs as a job of its own for each batch size, on one worker, for some steps and no further. Nothing in it is
changed: whatever `batch_size` it gives to `job.dataloader` or `job.shards`, its loaders take the one that is to be measured,
and it has one virtual worker per worker, whatever number it asks for. The exchange is what a step on several workers takes
longer than on one, with a single sample each, so that as little computing as possible is mistaken for it. What comes out is a
`core.profile.Profile`, which the planner reads.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from gyrostat.core.errors import ScriptFailed, UsageError
from gyrostat.core.placement import Placement
from gyrostat.core.profile import Points, Profile, Speed
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.worker_tracker import FailureCause
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import FromWorker, Program, Started
from gyrostat.job.processes.start import WorkerSource

_WARM_UP = 3
"""Steps that are not measured: buckets are laid out anew, allocators fill their pools."""
_FEWEST = 3
"""So many steps must be left to measure."""


@dataclass(frozen=True, kw_only=True)
class DeviceProfileRequest:
    """What to measure."""

    program: Program
    batches: tuple[int, ...]
    workers: tuple[int, ...] = (2,)
    """The numbers of workers for which the exchange is measured; none: it is left out."""
    steps: int = 20
    threads: int = 1
    device_type: str | None = None
    """What this machine's device is called; None: as it calls itself."""
    workload: str | None = None
    """What the script is called; None: by its name."""

    def check(self) -> None:
        """Refuse what cannot be measured, before anything is started."""
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise UsageError(f"batch sizes are whole numbers from 1 on, each once; got {list(self.batches)}")
        if any(workers < 2 for workers in self.workers) or len(set(self.workers)) < len(self.workers):
            raise UsageError(f"gradients are exchanged by 2 workers or more; got {list(self.workers)}")
        if self.steps < _FEWEST:
            raise UsageError(f"at least {_FEWEST} steps are measured, got {self.steps}")

    def run(self, batch: int, workers: int = 1) -> RunRequest:
        return RunRequest(
            program=self.program,
            placement=Placement.even(workers, workers),
            batch_size=batch,
            threads=self.threads,
            stop_after=_WARM_UP + self.steps,
        )


def profile_device(
    request: DeviceProfileRequest, parent: WorkerSource, tell: Callable[[str], None] = lambda line: None
) -> Profile:
    """Measure; `tell` is given a line for everything that was found."""
    request.check()
    hears = _HearsDevice()
    rates: list[tuple[int, float]] = []
    for batch in sorted(request.batches):
        outcome = run_job(request.run(batch), parent=parent, observer=hears)
        if rates and _out_of_memory(outcome):
            tell(f"batch {batch} does not fit: {outcome.failure}; larger ones are left out")
            break
        rates.append((batch, batch / step_seconds(outcome, batch)))
        tell(f"batch {batch}: {rates[-1][1]:,.1f} samples/s")
    exchange = _exchange(request, parent, tell) if request.workers else ()
    name = request.workload or os.path.splitext(os.path.basename(request.program.name))[0]
    return Profile(name, {request.device_type or hears.device_type(): Speed(tuple(rates), exchange)})


def step_seconds(outcome: Outcome, batch: int) -> float:
    """The median step of a run with micro-batches of `batch` samples."""
    outcome.check()
    if len(outcome.step_times) < _WARM_UP + _FEWEST:
        raise UsageError(
            f"with batches of {batch} the script ended after {len(outcome.step_times)} steps; it takes "
            f"{_WARM_UP + _FEWEST} at least to measure: give it more data, or more epochs"
        )
    per_step = outcome.samples / len(outcome.step_times) / outcome.virtual_workers
    if per_step < 0.9 * batch:
        raise UsageError(
            f"steps have {per_step:.1f} samples on average, not {batch}: the script's dataset has too few for such batches"
        )
    times = outcome.step_times[_WARM_UP - 1 :]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def _exchange(request: DeviceProfileRequest, parent: WorkerSource, tell: Callable[[str], None]) -> Points:
    """Seconds per step by number of workers: what a step takes longer than on one worker."""
    batch = 1
    alone = run_job(request.run(batch), parent=parent)
    if alone.failure is not None:  # batch norm, for one, cannot do with a single sample
        batch = min(request.batches)
        alone = run_job(request.run(batch), parent=parent)
    points = []
    for workers in sorted(request.workers):
        together = run_job(request.run(batch, workers), parent=parent)
        seconds = max(0.0, step_seconds(together, batch) - step_seconds(alone, batch))
        points.append((workers, seconds))
        tell(f"exchange among {workers} workers: {1e3 * seconds:.2f} ms per step (batches of {batch})")
    return tuple(points)


def _out_of_memory(outcome: Outcome) -> bool:
    """torch says so, or the kernel killed it."""
    failure = outcome.failure
    return failure is not None and (
        "OutOfMemoryError" in failure.summary
        or "can't allocate memory" in failure.summary
        or (failure.cause is FailureCause.KILLED and "SIGKILL" in failure.summary)
    )


class _HearsDevice(NullObserver):
    """Learns what the workers run on."""

    def __init__(self) -> None:
        self._compatibility: dict[str, str] = {}

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, Started):
            self._compatibility = message.compatibility

    def device_type(self) -> str:
        from gyrostat.engine.numerics.determinism import cpu_type  # imports torch

        if not self._compatibility:
            raise ScriptFailed("the script did not begin to train, so nothing is known of its device")
        return self._compatibility.get("gpu") or cpu_type(os.environ) or "cpu"

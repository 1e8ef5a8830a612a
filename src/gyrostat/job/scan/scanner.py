"""Runs a script under both levels, in two workers that take turns; `verdict` evaluates the measurements."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from gyrostat.core.errors import UsageError
from gyrostat.core.job import CheckpointPolicy, Determinism, DevicePool, TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerSource
from gyrostat.job.scan import turns
from gyrostat.job.scan.measured import Measured, Orders
from gyrostat.job.scan.verdict import ScanVerdict, decide

_WARM_UP = 5
_LEVELS = (Determinism.ELASTIC, Determinism.HETEROGENEOUS)


@dataclass(frozen=True, kw_only=True)
class ScanRequest:
    """The script, and the steps to measure."""

    program: Program
    pool: DevicePool
    virtual_workers: int | None = None
    """None: one, or the script's number."""
    steps: int = 60
    """Steps to time under each level."""
    profiled: int = 10
    """Steps to profile after those."""
    threshold: float = 1.05
    """The largest slowdown at which the job may mix types."""
    cwd: Path = field(default_factory=Path)

    def check(self) -> None:
        if min(self.steps, self.profiled) < 1:
            raise UsageError("a scan needs at least one step to time and one to profile")
        self._request(self.program, Determinism.ELASTIC).check()

    def orders(self, directory: Path, level: Determinism, other: Determinism) -> Orders:
        return Orders(
            program=self.program,
            directory=str(directory),
            level=level,
            other=other,
            warm_up=_WARM_UP,
            timed=self.steps,
            profiled=self.profiled,
        )

    def run(self, orders: Orders) -> RunRequest:
        """The job that measures as `orders` says."""
        text = msgspec.json.encode(orders).decode()
        program = Program(name="gyrostat.job.scan.inside", module=True, args=(text,))
        request = self._request(program, Determinism(orders.level))
        checkpoints = (
            f"{orders.directory}/{orders.level}-checkpoints"  # the script's own checkpoints are not used
        )
        policy = CheckpointPolicy(directory=checkpoints, resume=False)
        return replace(request, options=replace(request.options, stop_after=orders.steps, checkpoint=policy))

    def _request(self, program: Program, level: Determinism) -> RunRequest:
        return RunRequest(
            program=program,
            placement=Placement.even(self.virtual_workers or 1, 1),
            options=TrainingOptions(
                virtual_workers_given=self.virtual_workers is not None,
                threads=self.pool.threads,
                determinism=level,
                pool=self.pool if level is Determinism.HETEROGENEOUS else None,
            ),
            cwd=self.cwd,
        )


def scan(request: ScanRequest, *, parents: tuple[WorkerSource, WorkerSource]) -> ScanVerdict:
    """Run the script under both levels at once: two jobs in two threads, each with its own source of workers."""
    request.check()
    with tempfile.TemporaryDirectory(prefix="gyrostat-scan-") as name, ThreadPoolExecutor(2) as threads:
        directory = Path(name)
        turns.make(directory, _LEVELS)
        runs = [
            threads.submit(_measure, request, directory, level, other, parent)
            for level, other, parent in zip(_LEVELS, _LEVELS[::-1], parents, strict=True)
        ]
        elastic, heterogeneous = [run.result() for run in runs]
    return decide(
        elastic,
        heterogeneous,
        pool=request.pool,
        cpu_type=elastic.cpu_type,
        threshold=request.threshold,
    )


def _measure(
    request: ScanRequest, directory: Path, level: Determinism, other: Determinism, parent: WorkerSource
) -> Measured:
    orders = request.orders(directory, level, other)
    try:
        outcome = run_job(request.run(orders), parent=parent).check()
    finally:
        turns.free(directory, other)
    if not orders.result.exists():
        raise UsageError(
            f"the script made {outcome.steps} steps, but a scan needs {orders.steps}: give it more data or epochs, or scan "
            "with fewer --steps"
        )
    return msgspec.json.decode(orders.result.read_bytes(), type=Measured)

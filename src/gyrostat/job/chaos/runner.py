"""Runs a job once undisturbed, then repeatedly under faults, and compares the results (`job_run`, `verdict`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gyrostat.core.errors import ScriptFailed, UsageError
from gyrostat.job.chaos.job_run import ChaosObserver, JobRun, RunSettings
from gyrostat.job.chaos.plan import OF_AGENTS, OF_WORKERS, Fault, plan
from gyrostat.job.chaos.verdict import ChaosVerdict, Round, differences
from gyrostat.job.processes.protocol import Program


@dataclass(frozen=True, kw_only=True)
class ChaosRequest:
    """The job, and the faults to inject."""

    run: Sequence[str]
    """The command `gyrostat run`."""
    program: Program
    virtual_workers: int
    workers: int
    directory: Path
    """For records, checkpoints and logs."""
    seed: int
    seconds: float
    """Faults are injected for this long."""
    faults: int | None = None
    """The maximum number of faults."""
    every: float = 2.0
    """Mean seconds between two faults."""
    nodes: int = 2
    """The number of agents; with 1 there is no agent, and none is killed."""
    options: Sequence[str] = ()
    """Further options of `gyrostat run`."""
    checkpoint_every: int = 20
    standstill_s: float = 120.0
    """A round fails if no step is completed for this long."""

    def check(self) -> None:
        """Raise `UsageError` for values that make no sense."""
        if not 1 <= self.workers <= self.virtual_workers:
            raise UsageError(
                f"{self.workers} workers cannot share {self.virtual_workers} virtual workers; give --virtual-workers N and "
                "--workers P, with P from 1 to N"
            )
        if self.seconds <= 0 or self.every <= 0 or self.nodes < 1 or (self.faults or 1) < 1:
            raise UsageError(
                "--minutes and --every must be more than 0, --nodes and --faults at least 1; got "
                f"{self.seconds / 60:g}, {self.every:g}, {self.nodes} and {self.faults}"
            )

    def settings(self, name: str, *, agents: int, number: int = 0) -> RunSettings:
        """Those of one run, with a directory of this name."""
        return RunSettings(
            run=(
                *self.run,
                *("--virtual-workers", str(self.virtual_workers), "--workers", str(self.workers)),
                *("--checkpoint-every", str(self.checkpoint_every)),
                *self.options,
            ),
            program=self.program,
            virtual_workers=self.virtual_workers,
            directory=self.directory / name,
            agents=agents,
            number=number,
            standstill_s=self.standstill_s,
        )


def run_chaos(request: ChaosRequest, observer: ChaosObserver | None = None) -> ChaosVerdict:
    """Run the job once undisturbed, then under faults until the time is over, the faults are used up, or a run differs."""
    request.check()
    observer = observer or ChaosObserver()
    undisturbed = JobRun(request.settings("undisturbed", agents=0), observer).run(iter(())).recorded
    if not undisturbed.digests:
        raise ScriptFailed(f"the undisturbed run did not finish; see the logs in {request.directory}")
    observer.undisturbed(undisturbed)
    agents = request.nodes if request.nodes > 1 else 0
    kinds = (*OF_WORKERS, *OF_AGENTS) if agents else OF_WORKERS
    faults = _FaultBudget(request, plan(request.seed, every=request.every, kinds=kinds))
    rounds: list[Round] = []
    while faults.left:
        number = len(rounds)
        settings = request.settings(f"round-{number}", agents=agents, number=number)
        round = JobRun(settings, observer).run(faults)
        round = replace(round, differences=[*round.differences, *differences(round.recorded, undisturbed)])
        rounds.append(round)
        observer.round_over(round)
        if round.differences:
            break
    return ChaosVerdict(seed=request.seed, undisturbed=undisturbed, rounds=rounds)


class _FaultBudget:
    """Faults until their number or the time is used up."""

    def __init__(self, request: ChaosRequest, faults: Iterator[Fault]) -> None:
        self._faults, self._remaining = faults, request.faults
        self._until = time.monotonic() + request.seconds

    @property
    def left(self) -> bool:
        return self._remaining != 0 and time.monotonic() < self._until

    def __iter__(self) -> _FaultBudget:
        return self

    def __next__(self) -> Fault:
        if not self.left:
            raise StopIteration
        if self._remaining is not None:
            self._remaining -= 1
        return next(self._faults)

"""Runs a job once undisturbed, then repeatedly under faults, and compares the results (`job_run`, `verdict`)."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from gyrostat.core.errors import ScriptFailed, UsageError
from gyrostat.core.roles import ServerRecovery
from gyrostat.job.chaos.job_run import ChaosObserver, JobRun
from gyrostat.job.chaos.plan import plan, with_checkpoints
from gyrostat.job.chaos.record import RecordedRun
from gyrostat.job.chaos.target import ChaosTarget, RoundSettings
from gyrostat.job.chaos.verdict import ChaosVerdict, Round
from gyrostat.job.processes.protocol import Program

MakeTarget = Callable[[RoundSettings], ChaosTarget]


@dataclass(frozen=True, kw_only=True)
class ChaosRequest:
    """The job, and the faults to inject."""

    program: Program
    virtual_workers: int
    workers: int
    directory: Path
    """For records, checkpoints and logs."""
    seed: int
    """Of the first round; the next round has the next one."""
    seconds: float
    """Faults are injected for this long."""
    faults: int | None = None
    """The maximum number of faults."""
    every: float = 2.0
    """Mean seconds between two faults."""
    paced: str | None = None
    checkpoint_every: int = 20
    servers: int = 0
    """Parameter servers; 0: a synchronous job."""
    server_recovery: ServerRecovery = ServerRecovery.EXACT
    keep: bool = False
    """Keep the directories of all rounds, not only of one that failed."""

    def check(self) -> None:
        """Raise `UsageError` for values that make no sense."""
        if not self.servers and not 1 <= self.workers <= self.virtual_workers:
            raise UsageError(
                f"{self.workers} workers cannot share {self.virtual_workers} virtual workers; give --virtual-workers N and "
                "--workers P, with P from 1 to N"
            )
        if self.seconds <= 0 or self.every <= 0 or (self.faults or 1) < 1:
            raise UsageError(
                "--minutes and --every must be more than 0, --faults at least 1; got "
                f"{self.seconds / 60:g}, {self.every:g} and {self.faults}"
            )

    def settings(self, name: str, *, number: int = 0, checkpoints: bool = False) -> RoundSettings:
        """Those of one run, with a directory of this name."""
        return RoundSettings(
            program=self.program,
            virtual_workers=self.virtual_workers,
            workers=self.workers,
            directory=self.directory / name,
            number=number,
            checkpoints=checkpoints,
            checkpoint_every=self.checkpoint_every,
            paced=self.paced,
            servers=self.servers,
            server_recovery=self.server_recovery,
        )


def run_chaos(
    request: ChaosRequest,
    undisturbed_target: MakeTarget,
    target: MakeTarget,
    observer: ChaosObserver | None = None,
) -> ChaosVerdict:
    """Run the job once undisturbed, then under faults until the time is over, the faults are used up, or a run fails."""
    request.check()
    observer = observer or ChaosObserver()
    settings = request.settings("undisturbed")
    first = JobRun(settings, undisturbed_target(settings), observer, start_s=60.0).run(iter(()))
    undisturbed = first.jobs[0]
    if not undisturbed.digests:
        raise ScriptFailed(
            f"the undisturbed run did not finish: {'; '.join(map(str, first.failures))}; see the logs in {settings.directory}"
        )
    if request.servers:
        _compare_alone(request, undisturbed, undisturbed_target, observer)
    observer.undisturbed(undisturbed)
    start_s = min(undisturbed.times) - first.began
    until = time.monotonic() + request.seconds
    left = math.inf if request.faults is None else request.faults
    rounds: list[Round] = []
    while left > 0 and time.monotonic() < until:
        number = len(rounds)
        seed = request.seed + number
        settings = request.settings(f"round-{number}", number=number, checkpoints=with_checkpoints(seed))
        made = target(settings)
        faults = plan(seed, every=request.every, kinds=made.kinds)
        in_time = takewhile(lambda _: time.monotonic() < until, faults)
        round = JobRun(settings, made, observer, start_s=start_s).run(in_time, left)
        left -= len(round.faults)
        round = replace(round, failures=round.compared(undisturbed))
        rounds.append(round)
        observer.round_over(round)
        if round.failures:
            break
        if not request.keep:
            shutil.rmtree(settings.directory)
    return ChaosVerdict(seed=request.seed, undisturbed=undisturbed, rounds=rounds)


def _compare_alone(
    request: ChaosRequest, undisturbed: RecordedRun, make_target: MakeTarget, observer: ChaosObserver
) -> None:
    """Run a job with servers again with one worker and one server. If that gives another digest, it depends on the order of
    updates, and digests are not compared."""
    settings = replace(
        request.settings("undisturbed-alone"),
        workers=1,
        servers=1,
        server_recovery=ServerRecovery.EXACT,
    )
    alone = JobRun(settings, make_target(settings), observer, start_s=60.0).run(iter(())).jobs[0]
    if alone.digests != undisturbed.digests:
        undisturbed.digests.clear()

"""One run of a job under faults: injects them, reads what workers record, and notices its end, or that it hangs.

One thread polls processes and records and injects faults into workers; faults of the target (`target`) may wait for a reply,
so they run in a thread pool.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from gyrostat.job.chaos.plan import MOST_WITHOUT_STEP, Fault, FaultKind, longest_standstill_s
from gyrostat.job.chaos.processes import RunProcesses
from gyrostat.job.chaos.record import (
    RecordedRun,
    RecordReader,
    StepDone,
    WorkerEnd,
    WorkerStarted,
    WorkerTrains,
)
from gyrostat.job.chaos.target import ChaosTarget, Ended, RoundSettings
from gyrostat.job.chaos.verdict import InjectedFault, Round, RoundFailure, RoundFailureKind

_POLL_S = 0.02
_NEWCOMER_S = 5.0
"""How long a newcomer is waited for after it was requested."""


class ChaosObserver:
    """Receives the progress of a chaos run; override what is needed."""

    def undisturbed(self, recorded: RecordedRun) -> None:
        """The undisturbed run has ended."""

    def fault_injected(self, fault: InjectedFault) -> None:
        """A fault was injected."""

    def round_over(self, round: Round) -> None:
        """A run under faults has ended."""


class JobRun:
    """One run of the job."""

    def __init__(
        self, settings: RoundSettings, target: ChaosTarget, observer: ChaosObserver, *, start_s: float
    ) -> None:
        """`start_s`: how long the undisturbed run took to its first step."""
        self._settings, self._target, self._observer, self._start_s = settings, target, observer, start_s
        for directory in target.records:
            directory.mkdir(parents=True)
        self._readers = [RecordReader(directory) for directory in target.records]
        self._jobs = [RecordedRun(on_servers=settings.servers > 0) for _ in target.records]
        self._processes = RunProcesses(settings.directory)
        self._members: dict[int, int] = {}
        self._trains: set[int] = set()
        self._without_step = 0
        self._due: list[tuple[float, Fault]] = []
        self._injected: list[tuple[float, InjectedFault]] = []
        self._failures: list[RoundFailure] = []
        self._pool = ThreadPoolExecutor(8)

    def run(self, faults: Iterator[Fault], most: float = math.inf) -> Round:
        """Start the job, and inject faults until it has ended: these, until `most` have hit something."""
        self._began = self._progress_at = time.monotonic()
        try:
            self._target.start(self._processes)
            while not self._failures and not self._target.over:
                self._read()
                self._processes.continue_stopped()
                for ended in self._target.supervise():
                    self._check_end(ended)
                self._check_standstill()
                if not self._due and len(self._injected) < most and (fault := next(faults, None)) is not None:
                    self._due.append((time.monotonic() + fault.after, fault))
                if (
                    self._due
                    and time.monotonic() >= self._due[0][0]
                    and self._without_step < MOST_WITHOUT_STEP
                ):
                    self._inject(self._due.pop(0)[1])
                time.sleep(_POLL_S)
            for ended in self._target.supervise() if not self._failures else ():
                self._check_end(ended)
        finally:
            self._target.close()
            self._processes.kill_all()
            self._pool.shutdown()
        self._read()
        injected = sorted(self._injected, key=lambda pair: pair[0])
        return Round(
            jobs=self._jobs,
            began=self._began,
            faults=[self._with_time(at, fault) for at, fault in injected],
            failures=self._failures,
        )

    # Observation.

    def _read(self) -> None:
        for reader, job in zip(self._readers, self._jobs, strict=True):
            for entry in reader.new_entries():
                furthest = job.last_step
                job.add(entry)
                if job.last_step > furthest or isinstance(entry, WorkerEnd):
                    self._progress_at = time.monotonic()
                match entry:
                    case WorkerStarted(pid=pid, member=member):
                        self._members[pid] = member
                    case WorkerTrains(pid=pid):
                        self._trains.add(pid)
                    case StepDone():
                        self._without_step = 0

    def _check_end(self, ended: Ended) -> None:
        """An exit code of 0 means a complete result, and any other one means none."""
        self._read()  # a worker records the digest before it reports it
        job = self._jobs[ended.job]
        if ended.totals is not None:
            job.totals = ended.totals
            job.digests.add(ended.totals.digest)
        complete = bool(job.digests)
        if ended.digest is not None:
            job.digests.add(ended.digest)
        if complete and ended.code == 0:
            return
        untrue = complete or ended.code == 0
        when = (
            "although the result is complete" if complete else f"without a result, after step {job.last_step}"
        )
        self._fail(
            RoundFailureKind.EXIT_CODE if untrue else RoundFailureKind.GAVE_UP,
            f"{ended.name} ended with exit code {ended.code}, {when}",
            ended.last_lines,
        )

    def _check_standstill(self) -> None:
        longest = longest_standstill_s(
            start_s=self._start_s, timeouts_s=self._target.timeouts_s, faults=self._without_step
        )
        if time.monotonic() - self._progress_at <= longest:
            return
        self._processes.print_stacks()
        steps = ", ".join(str(job.last_step) for job in self._jobs)
        text = f"no step and no end for {longest:.0f} s, after step {steps}; the logs end with the stacks of all processes"
        self._fail(RoundFailureKind.HANG, text, ())

    def _fail(self, kind: RoundFailureKind, text: str, last_lines: Sequence[str]) -> None:
        last = f"; the last fault: {self._injected[-1][1]}" if self._injected else ""
        lines = "".join(f"\n    {line}" for line in last_lines)
        self._failures.append(
            RoundFailure(kind, f"{text}{last}" + (f"; its last lines:{lines}" if lines else ""))
        )

    # Injection.

    def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.KILL | FaultKind.KILL_TWO:
                self._record(fault, self._kill_workers(fault, 2 if fault.kind is FaultKind.KILL_TWO else 1))
            case FaultKind.STOP:
                victims = fault.victims(self._workers(), 1)
                stopped = [pid for pid in victims if self._processes.stop(pid, fault.seconds)]
                self._record(fault, [f"{self._name(pid)} for {fault.seconds:.2f} s" for pid in stopped])
            case FaultKind.FORK_SERVER:
                self._record(fault, self._kill_fork_server(fault))
            case FaultKind.RESIZE:
                self._pool.submit(self._resize, fault)
            case FaultKind.NEWCOMER:
                self._pool.submit(self._kill_newcomer, fault)
            case _:
                self._pool.submit(self._inject_into_target, fault)

    def _workers(self) -> list[int]:
        return self._processes.workers(self._target.fork_servers())

    def _kill_workers(self, fault: Fault, count: int) -> list[str]:
        workers = self._workers()
        victims = fault.victims(workers, count)
        while victims and not self._may_lose(set(workers) - set(victims)):
            victims.pop()
        return [self._name(pid) for pid in victims if self._processes.signal(pid, signal.SIGKILL)]

    def _kill_fork_server(self, fault: Fault) -> list[str]:
        servers = self._target.fork_servers()
        victims = fault.victims(servers, 1)
        left = self._processes.workers(set(servers) - set(victims))
        if not self._may_lose(set(left)):
            return []
        return [f"process {pid}" for pid in victims if self._processes.signal(pid, signal.SIGKILL)]

    def _may_lose(self, left: set[int]) -> bool:
        """Whether the job may lose all but these workers: one that trains, or a checkpoint, must be left."""
        if self._settings.servers:
            return True  # parameters and shards are elsewhere
        return self._settings.checkpoints or not self._trains or bool(left & self._trains)

    def _resize(self, fault: Fault) -> None:
        """In a thread: the reply arrives when the job is resized."""
        at = time.monotonic()
        reply = self._target.resize(fault.size(self._settings.most_workers))
        self._record(fault, [] if reply is None else [reply], at)

    def _kill_newcomer(self, fault: Fault) -> None:
        """In a thread: request as many workers as possible, and kill one of those that do not train yet."""
        self._pool.submit(self._target.resize, self._settings.most_workers)
        until = time.monotonic() + _NEWCOMER_S
        while time.monotonic() < until:
            newcomers = [pid for pid in self._workers() if pid not in self._trains]
            if newcomers:
                time.sleep(fault.chances[1] / 4)  # somewhere between its fork and its first step
                killed = [
                    pid for pid in fault.victims(newcomers, 1) if self._processes.signal(pid, signal.SIGKILL)
                ]
                self._record(fault, [self._name(pid) for pid in killed])
                return
            time.sleep(_POLL_S)

    def _inject_into_target(self, fault: Fault) -> None:
        """In a thread."""
        with_worker = fault.kind in (FaultKind.LEADER_AND_WORKER, FaultKind.SERVER_AND_WORKER)
        killed = self._kill_workers(fault, 1) if with_worker else []
        hit = self._target.inject(fault)
        self._record(fault, [*([] if hit is None else [hit]), *killed])

    def _name(self, pid: int) -> str:
        member = self._members.get(pid)
        return f"worker {member} (process {pid})" if member is not None else f"process {pid}, which starts"

    def _record(self, fault: Fault, targets: list[str], at: float | None = None) -> None:
        """A fault that hit nothing is none; while the job starts it is tried again, at any time of the next second."""
        now = time.monotonic()
        if not targets:
            if not self._trains:
                self._due.append((now + fault.chances[1], fault))
            return
        at = now if at is None else at
        self._progress_at = now
        self._without_step += 1
        injected = InjectedFault(
            round=self._settings.number,
            at=at - self._began,
            kind=fault.kind,
            target=" and ".join(targets),
            step=self._jobs[0].last_step,
        )
        self._injected.append((at, injected))
        self._observer.fault_injected(injected)

    def _with_time(self, at: float, fault: InjectedFault) -> InjectedFault:
        after = [time for job in self._jobs for time in job.times if time > at]
        return replace(fault, until_next_step=min(after) - at if after else None)

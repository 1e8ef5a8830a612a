"""One run of a job, and the injection of faults into its processes.

The job runs as its user would start it: one process that leads on this machine, or, so that the leader can be killed, an agent
for each of several nodes, all on this machine. Its workers are found through their records (`record`, `victims`).

One thread polls processes and records and injects faults; resizing the job and killing the leader wait for a reply, so they run
in a thread pool.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from gyrostat.core.errors import GyrostatError
from gyrostat.job.chaos.plan import Fault, FaultKind
from gyrostat.job.chaos.record import RecordedRun, RecordReader, StepDone, TrainingBegan, WorkerStarted
from gyrostat.job.chaos.verdict import InjectedFault, Round
from gyrostat.job.chaos.victims import WorkerTargets
from gyrostat.job.control.client import JobClient
from gyrostat.job.processes.protocol import Program

_POLL_S = 0.02
_BUSY_S = 5.0
"""A resize is repeated for this long while the job is busy."""
_LEASE_S = 2.0
_NODE_TIMEOUT_S = 20.0
_LAST_LINES = 20
_INSIDE = "gyrostat.job.chaos.inside"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How to start one run."""

    run: Sequence[str]
    """The command `gyrostat run` with the options that all runs share."""
    program: Program
    virtual_workers: int
    directory: Path
    agents: int
    """0: the process that starts the job leads it."""
    number: int
    standstill_s: float

    @property
    def job(self) -> str:
        """The name of the job."""
        return f"chaos-{os.getpid()}-{self.number}"

    def command(self, node: int) -> list[str]:
        """Starts the job, or its agent on node `node`."""
        command = [
            *self.run,
            *("--checkpoint-dir", str(self.directory / "checkpoints")),
            *("--restarts", "1000000", "--poison-limit", "0"),
            *("--name", self.job),
        ]
        if self.agents:
            command += ["--store", f"file://{self.directory}/lease", "--nodes", str(self.agents)]
            command += ["--node", f"node{node}", "--lease", str(_LEASE_S)]
            command += ["--node-timeout", str(_NODE_TIMEOUT_S)]
        kind = "module" if self.program.module else "script"
        return [*command, "-m", _INSIDE, str(self.directory), kind, self.program.name, *self.program.args]


class ChaosObserver:
    """Receives the progress of a chaos run; override what is needed."""

    def undisturbed(self, recorded: RecordedRun) -> None:
        """The undisturbed run has ended."""

    def fault_injected(self, fault: InjectedFault) -> None:
        """A fault was injected."""

    def round_over(self, round: Round) -> None:
        """A run under faults has ended."""


class _JobProcess:
    """An agent of the job, or the single process that leads it."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.restart_at: float | None = None

    def kill(self, away: float) -> None:
        """The run restarts it after `away` seconds."""
        self.process.kill()
        self.process.wait()
        self.restart_at = time.monotonic() + away

    def last_lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]


class JobRun:
    """One run of the job."""

    def __init__(self, settings: RunSettings, observer: ChaosObserver) -> None:
        self._settings, self._observer = settings, observer
        settings.directory.mkdir(parents=True)
        self._reader = RecordReader(settings.directory)
        self._recorded = RecordedRun()
        self._workers = WorkerTargets()
        self._began: float | None = None
        self._step = 0
        self._progress_at = time.monotonic()
        self._injected: list[tuple[float, InjectedFault]] = []
        self._pool = ThreadPoolExecutor(8)
        self._nodes: list[_JobProcess] = []

    def run(self, faults: Iterator[Fault]) -> Round:
        """Start the job, and inject `faults` until it has ended."""
        settings = self._settings
        self._nodes = [
            _JobProcess(f"node {node}", settings.command(node), settings.directory / f"node-{node}.log")
            for node in range(max(1, settings.agents))
        ]
        problem = None
        try:
            due: tuple[float, Fault] | None = None
            while problem is None and not self._over():
                self._read()
                self._workers.continue_stopped()
                problem = self._check_nodes()
                if self._began is not None and due is None and (fault := next(faults, None)) is not None:
                    due = time.monotonic() + fault.after, fault
                if due is not None and time.monotonic() >= due[0]:
                    self._inject(due[1])
                    due = None
                time.sleep(_POLL_S)
            self._read()
        finally:
            self._close()
        injected = sorted(self._injected, key=lambda pair: pair[0])
        return Round(
            recorded=self._recorded,
            faults=[self._with_time(at, fault) for at, fault in injected],
            differences=[] if problem is None else [problem],
        )

    def _over(self) -> bool:
        return all(node.restart_at is None and node.process.poll() is not None for node in self._nodes)

    def _check_nodes(self) -> str | None:
        """Restart processes that were killed. Returns the problem if the run has failed."""
        now = time.monotonic()
        for node in self._nodes:
            if node.restart_at is not None:
                if now >= node.restart_at:
                    node.start()
            elif node.process.poll() not in (None, 0):
                lines = "\n".join(node.last_lines())
                return f"{node.name} ended with exit code {node.process.returncode}; its last lines:\n{lines}"
        if now - self._progress_at > self._settings.standstill_s:
            return f"no step was completed for {self._settings.standstill_s:g} s, after step {self._step}"
        return None

    def _close(self) -> None:
        """Leave no process of this run behind."""
        for node in self._nodes:
            node.process.kill()
            node.process.wait()
        self._workers.close()
        self._pool.shutdown()

    def _read(self) -> None:
        for entry in self._reader.new_entries():
            self._recorded.add(entry)
            match entry:
                case WorkerStarted(pid=pid, member=member, parent=parent):
                    self._workers.add(member, pid, parent)
                case TrainingBegan(at=at):
                    self._began = self._began or at
                    self._progress_at = time.monotonic()
                case StepDone(step=step):
                    self._step, self._progress_at = max(self._step, step), time.monotonic()

    def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.KILL | FaultKind.KILL_TWO:
                if killed := self._workers.kill(fault, 2 if fault.kind is FaultKind.KILL_TWO else 1):
                    self._record(fault, " and ".join(killed))
            case FaultKind.STOP:
                for worker in self._workers.stop(fault):
                    self._record(fault, f"{worker} for {fault.seconds:.2f} s")
            case FaultKind.RESIZE:
                self._pool.submit(self._resize, fault)
            case FaultKind.AGENT:
                running = [node for node in self._nodes if node.restart_at is None]
                node = fault.victims(running or self._nodes, 1)[0]
                node.kill(fault.seconds)
                self._record(fault, node.name)
            case FaultKind.LEADER | FaultKind.LEADER_AND_WORKER:
                self._pool.submit(self._kill_leader, fault)

    def _resize(self, fault: Fault) -> None:
        """In a thread: the reply arrives when the job is resized."""
        size = fault.size(self._settings.virtual_workers)
        began, step = time.monotonic(), self._step
        try:
            with JobClient(self._settings.job) as job_client:
                result = job_client.scale(size)
                while not result.done and time.monotonic() < began + _BUSY_S:
                    time.sleep(_POLL_S)
                    result = job_client.scale(size)
        except GyrostatError:
            return  # the job has ended meanwhile
        if result.done:
            self._record(fault, result.text, began, step)

    def _kill_leader(self, fault: Fault) -> None:
        """In a thread: the job replies with its leader. No effect if there is none at the moment."""
        try:
            with JobClient(self._settings.job) as job_client:
                leader = job_client.status().pid
        except GyrostatError:
            return
        for node in self._nodes:
            if node.restart_at is None and node.process.pid == leader:
                killed = self._workers.kill(fault, 1) if fault.kind is FaultKind.LEADER_AND_WORKER else []
                node.kill(fault.seconds)
                self._record(fault, " and ".join([node.name, *killed]))

    def _record(self, fault: Fault, target: str, at: float | None = None, step: int | None = None) -> None:
        now = time.monotonic() if at is None else at
        injected = InjectedFault(
            round=self._settings.number,
            at=now - (self._began or now),
            kind=fault.kind,
            target=target,
            step=self._step if step is None else step,
        )
        self._injected.append((now, injected))
        self._observer.fault_injected(injected)

    def _with_time(self, at: float, fault: InjectedFault) -> InjectedFault:
        after = [time for time in self._recorded.times if time > at]
        return replace(fault, until_next_step=min(after) - at if after else None)

"""Runs a job again and again, and inflicts faults on its processes.

A round is one run of the job, as its user would start it: one process that leads on this machine, or, so that the leader can
be lost, an agent for each of several nodes, all on this machine. Workers are found through what they note when they come into
being. A worker is hit through a pidfd, so that never a stranger is who has got its number.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from gyrostat.core.errors import GyrostatError, ScriptFailed, UsageError
from gyrostat.job.chaos.plan import OF_AGENTS, OF_WORKERS, Fault, FaultKind, plan
from gyrostat.job.chaos.record import Reader, RecordedRun, StepDone, TrainingBegan, WorkerStarted
from gyrostat.job.chaos.verdict import ChaosVerdict, Round, Struck, differences
from gyrostat.job.control.client import JobClient
from gyrostat.job.processes.protocol import Program

_LOOK_S = 0.02
_BUSY_S = 5.0
"""For so long a resize is asked for again if the job is busy."""
_LEASE_S = 2.0
_PATIENCE_S = 20.0
_LAST_LINES = 20
_INSIDE = "gyrostat.job.chaos.inside"


@dataclass(frozen=True, kw_only=True)
class ChaosRequest:
    """What to run, and how to treat it."""

    run: Sequence[str]
    """The command `gyrostat run`."""
    program: Program
    virtual_workers: int
    workers: int
    directory: Path
    """For notes, checkpoints and logs."""
    seed: int
    seconds: float
    """No more faults after that."""
    faults: int | None = None
    """At most so many."""
    every: float = 2.0
    """Seconds between two faults, on average."""
    nodes: int = 2
    """With one there is no agent that could be lost."""
    options: Sequence[str] = ()
    """Of `gyrostat run`, further ones."""
    checkpoint_every: int = 20
    standstill_s: float = 120.0
    """A round in which no step is completed for so long has failed."""

    def check(self) -> None:
        if not 1 <= self.workers <= self.virtual_workers:
            raise UsageError(
                f"{self.workers} workers cannot share {self.virtual_workers} virtual workers; say --virtual-workers N and "
                "--workers P, with P from 1 to N"
            )
        if self.seconds <= 0 or self.every <= 0 or self.nodes < 1 or (self.faults or 1) < 1:
            raise UsageError(
                f"chaos needs some minutes, seconds between faults, nodes and faults; got {self.seconds / 60:g}, "
                f"{self.every:g}, {self.nodes} and {self.faults}"
            )


class ChaosObserver:
    """Looks on; what it does not override it does not care for."""

    def undisturbed(self, recorded: RecordedRun) -> None:
        """The run that was left alone is over."""

    def struck(self, struck: Struck) -> None:
        """A fault was inflicted."""

    def round_over(self, round: Round) -> None:
        """A run under faults has ended."""


def play(request: ChaosRequest, watcher: ChaosObserver | None = None) -> ChaosVerdict:
    """Run the job once undisturbed, then under faults until it is enough."""
    request.check()
    watcher = watcher or ChaosObserver()
    undisturbed = _Run(request, "undisturbed", agents=0).play(iter(()), watcher).recorded
    if not undisturbed.digests:
        raise ScriptFailed(f"the undisturbed run did not come to its end; see {request.directory}")
    watcher.undisturbed(undisturbed)
    agents = request.nodes if request.nodes > 1 else 0
    kinds = (*OF_WORKERS, *OF_AGENTS) if agents else OF_WORKERS
    faults = _Limited(request, plan(request.seed, every=request.every, kinds=kinds))
    rounds: list[Round] = []
    while faults.goes_on:
        run = _Run(request, f"round-{len(rounds)}", agents=agents, number=len(rounds))
        round = run.play(faults, watcher)
        round = replace(round, differences=[*round.differences, *differences(round.recorded, undisturbed)])
        rounds.append(round)
        watcher.round_over(round)
        if round.differences:
            break
    return ChaosVerdict(seed=request.seed, undisturbed=undisturbed, rounds=rounds)


class _Limited:
    """Faults, until there have been enough, or the time is over."""

    def __init__(self, request: ChaosRequest, faults: Iterator[Fault]) -> None:
        self._faults, self._left = faults, request.faults
        self._until = time.monotonic() + request.seconds

    @property
    def goes_on(self) -> bool:
        return self._left != 0 and time.monotonic() < self._until

    def __iter__(self) -> _Limited:
        return self

    def __next__(self) -> Fault:
        if not self.goes_on:
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        return next(self._faults)


class _Node:
    """A process of the job's that is not a worker: an agent, or the only leader."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.again_at: float | None = None

    def kill(self, away: float) -> None:
        """It comes back by itself, after a while."""
        self.process.kill()
        self.process.wait()
        self.again_at = time.monotonic() + away

    def last_lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]


@dataclass
class _Worker:
    member: int
    pid: int
    pidfd: int

    def signal(self, number: int) -> bool:
        """False: it has gone."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def lives(self) -> bool:
        """Whether it has not ended; one that has can be sent signals until it is buried."""
        return not select.select([self.pidfd], [], [], 0)[0]

    def __str__(self) -> str:
        return f"worker {self.member} (process {self.pid})"


class _Run:
    """One run of the job."""

    def __init__(self, request: ChaosRequest, name: str, *, agents: int, number: int = 0) -> None:
        """`agents`: 0 if it is led by the process that starts it."""
        self._request, self._number, self._agents = request, number, agents
        self._directory = request.directory / name
        self._directory.mkdir(parents=True)
        self._job = f"chaos-{os.getpid()}-{number}"
        self._reader = Reader(self._directory)
        self._recorded = RecordedRun()
        self._workers: dict[int, _Worker] = {}
        self._parents: dict[int, int] = {}
        self._stopped: list[tuple[float, _Worker]] = []
        self._killed: set[int] = set()
        self._began: float | None = None
        self._step = 0
        self._moved = time.monotonic()
        self._struck: list[tuple[float, Struck]] = []
        self._pool = ThreadPoolExecutor(8)
        self._nodes: list[_Node] = []

    def play(self, faults: Iterator[Fault], watcher: ChaosObserver) -> Round:
        self._watcher = watcher
        self._nodes = [self._node(number) for number in range(max(1, self._agents))]
        problem = None
        try:
            due: tuple[float, Fault] | None = None
            while problem is None and not self._over():
                self._read()
                self._wake()
                problem = self._look_after_nodes()
                if self._began is not None and due is None and (fault := next(faults, None)) is not None:
                    due = time.monotonic() + fault.after, fault
                if due is not None and time.monotonic() >= due[0]:
                    self._inflict(due[1])
                    due = None
                time.sleep(_LOOK_S)
            self._read()
        finally:
            self._close()
        return Round(
            recorded=self._recorded,
            struck=[
                self._with_time(at, struck) for at, struck in sorted(self._struck, key=lambda pair: pair[0])
            ],
            differences=[] if problem is None else [problem],
        )

    # Processes.

    def _node(self, number: int) -> _Node:
        request, program = self._request, self._request.program
        command = [
            *request.run,
            *("--virtual-workers", str(request.virtual_workers), "--workers", str(request.workers)),
            *("--checkpoint-dir", str(self._directory / "checkpoints")),
            *("--checkpoint-every", str(request.checkpoint_every)),
            *("--restarts", "1000000", "--poison-limit", "0"),
            *("--name", self._job),
            *request.options,
        ]
        if self._agents:
            command += ["--store", f"file://{self._directory}/lease", "--nodes", str(self._agents)]
            command += ["--node", f"node{number}", "--lease", str(_LEASE_S), "--patience", str(_PATIENCE_S)]
        kind = "module" if program.module else "script"
        command += ["-m", _INSIDE, str(self._directory), kind, program.name, *program.args]
        return _Node(f"node {number}", command, self._directory / f"node-{number}.log")

    def _over(self) -> bool:
        return all(node.again_at is None and node.process.poll() is not None for node in self._nodes)

    def _look_after_nodes(self) -> str | None:
        """Start again who was killed. What is wrong, if anything is."""
        now = time.monotonic()
        for node in self._nodes:
            if node.again_at is not None:
                if now >= node.again_at:
                    node.start()
            elif node.process.poll() not in (None, 0):
                told = "\n".join(node.last_lines())
                return f"{node.name} ended with exit code {node.process.returncode}; its last lines:\n{told}"
        if now - self._moved > self._request.standstill_s:
            return f"no step was completed for {self._request.standstill_s:g} s, after step {self._step}"
        return None

    def _close(self) -> None:
        """Nothing of this run stays behind."""
        for node in self._nodes:
            node.process.kill()
            node.process.wait()
        for pidfd in (*self._parents.values(), *(worker.pidfd for worker in self._workers.values())):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._pool.shutdown()

    # What workers note.

    def _read(self) -> None:
        for note in self._reader.news():
            self._recorded.add(note)
            match note:
                case WorkerStarted(pid=pid, member=member, parent=parent):
                    with contextlib.suppress(ProcessLookupError):
                        self._workers[pid] = _Worker(member, pid, os.pidfd_open(pid))
                        if parent not in self._parents:
                            self._parents[parent] = os.pidfd_open(parent)
                case TrainingBegan(at=at):
                    self._began = self._began or at
                    self._moved = time.monotonic()
                case StepDone(step=step):
                    self._step, self._moved = max(self._step, step), time.monotonic()

    def _living(self) -> list[_Worker]:
        out = self._killed | {worker.pid for _, worker in self._stopped}
        return [worker for worker in self._workers.values() if worker.pid not in out and worker.lives]

    def _wake(self) -> None:
        now = time.monotonic()
        for until, worker in self._stopped:
            if now >= until:
                worker.signal(signal.SIGCONT)
        self._stopped = [(until, worker) for until, worker in self._stopped if now < until]

    # Faults.

    def _inflict(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.KILL | FaultKind.KILL_TWO:
                if killed := self._kill(fault, 2 if fault.kind is FaultKind.KILL_TWO else 1):
                    self._note(fault, " and ".join(killed))
            case FaultKind.STOP:
                for worker in fault.victims(self._living(), 1):
                    if worker.signal(signal.SIGSTOP):
                        self._stopped.append((time.monotonic() + fault.seconds, worker))
                        self._note(fault, f"{worker} for {fault.seconds:.2f} s")
            case FaultKind.RESIZE:
                self._pool.submit(self._resize, fault)
            case FaultKind.AGENT:
                node = fault.victims(self._running(), 1)[0]
                node.kill(fault.seconds)
                self._note(fault, node.name)
            case FaultKind.LEADER | FaultKind.LEADER_AND_WORKER:
                self._pool.submit(self._kill_leader, fault)

    def _running(self) -> list[_Node]:
        """There is always one that is left alone."""
        running = [node for node in self._nodes if node.again_at is None]
        return running or self._nodes

    def _kill(self, fault: Fault, count: int) -> list[str]:
        """Returns whom, in words."""
        killed = [worker for worker in fault.victims(self._living(), count) if worker.signal(signal.SIGKILL)]
        self._killed |= {worker.pid for worker in killed}
        return list(map(str, killed))

    def _resize(self, fault: Fault) -> None:
        """In a thread: the answer comes when it is done."""
        size = fault.size(self._request.virtual_workers)
        began, step = time.monotonic(), self._step
        try:
            with JobClient(self._job) as job_client:
                answer = job_client.scale(size)
                while not answer.done and time.monotonic() < began + _BUSY_S:
                    time.sleep(_LOOK_S)
                    answer = job_client.scale(size)
        except GyrostatError:
            return  # the job has ended meanwhile
        if answer.done:
            self._note(fault, answer.text, began, step)

    def _kill_leader(self, fault: Fault) -> None:
        """In a thread: who leads is asked, and maybe nobody does now."""
        try:
            with JobClient(self._job) as job_client:
                leader = job_client.status().pid
        except GyrostatError:
            return
        for node in self._nodes:
            if node.again_at is None and node.process.pid == leader:
                killed = self._kill(fault, 1) if fault.kind is FaultKind.LEADER_AND_WORKER else []
                node.kill(fault.seconds)
                self._note(fault, " and ".join([node.name, *killed]))

    def _note(self, fault: Fault, whom: str, at: float | None = None, step: int | None = None) -> None:
        now = time.monotonic() if at is None else at
        struck = Struck(
            round=self._number,
            at=now - (self._began or now),
            kind=fault.kind,
            whom=whom,
            step=self._step if step is None else step,
        )
        self._struck.append((now, struck))
        self._watcher.struck(struck)

    def _with_time(self, at: float, struck: Struck) -> Struck:
        after = [time for time in self._recorded.times if time > at]
        return replace(struck, until_next_step=min(after) - at if after else None)

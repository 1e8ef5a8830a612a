"""The worker processes of a job with parameter servers: which to start, to ask to leave and to kill. Pure.

Facts go in (`started`, `exited`, `resize` …); `orders` compares what there should be with what there is and returns what
to do, with time as an argument. Workers are numbered as they are started, and no number is used twice.

1. A worker that dies is replaced: at once if the job has made progress since that worker was started, otherwise after a delay
   that doubles with every such death, up to a limit of deaths in a row (`FailurePolicy.restarts`).
2. A worker whose script raises or exits with an error ends the job, as elsewhere; so does a poison shard (`poison`).
3. A worker that is to leave is sent SIGTERM and leaves after its batch. If it has not left within its grace it is killed. That
   costs nothing but its batch: its shard goes back to the queue.
4. When one worker has finished its script, all epochs are over: the others finish too, and the dead are not replaced.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gyrostat.core.evidence import Evidence
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.restarts import DELAY
from gyrostat.job.control.worker_tracker import KILL_GRACE_S, FailureCause, JobFailure, describe_exit
from gyrostat.job.processes.protocol import Failed, FailureKind, WorkerEnded
from gyrostat.job.server_job.poison import ShardDeath, ShardInHand, poison_shard


class WorkerFate(StrEnum):
    """How a worker process has ended."""

    FINISHED = "finished"
    """Its script has ended: all epochs are over."""
    LEFT = "left"
    """It was asked to."""
    DIED = "died"
    """Another one takes its place."""
    FAILED = "failed"
    """The job ends with its failure."""


@dataclass(frozen=True)
class StartMember:
    """Start a worker process under this number."""

    member: int


@dataclass(frozen=True)
class SignalMember:
    member: int
    signal: int


Order = StartMember | SignalMember


@dataclass(frozen=True)
class WorkerExit:
    member: int
    fate: WorkerFate
    how: str
    evidence: tuple[str, ...] = ()


@dataclass
class _Process:
    updates: int
    """Of the job when it was started."""
    trains: bool = False
    """It has begun its first loop."""
    leave_by: float | None = None
    """It has been asked to leave."""
    asked: bool = False
    """SIGTERM has been sent."""
    killed: str | None = None
    """Why the job itself killed it."""
    failed: Failed | None = None
    ended: WorkerEnded | None = None


@dataclass
class ServerWorkers:
    """The worker processes of one job."""

    target: int
    policy: FailurePolicy
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of those that have ended."""
    failure: JobFailure | None = None
    """The job ends with it."""
    finished: bool = False
    """A worker has finished its script."""
    deaths: int = 0
    _processes: dict[int, _Process] = field(default_factory=dict)
    _next: int = 0
    _ending: bool = False
    _in_vain: int = 0
    _start_at: float = float("-inf")
    _shard_deaths: list[ShardDeath] = field(default_factory=list)

    @property
    def living(self) -> tuple[int, ...]:
        return tuple(self._processes)

    @property
    def members(self) -> tuple[int, ...]:
        """Those that are not leaving."""
        return tuple(member for member, process in self._processes.items() if process.leave_by is None)

    @property
    def training(self) -> tuple[int, ...]:
        """Those that have begun to train, and are not leaving."""
        return tuple(member for member in self.members if self._processes[member].trains)

    @property
    def settled(self) -> bool:
        """All that should train do, and nobody else is there."""
        return len(self.training) == len(self._processes) == self.target

    @property
    def over(self) -> bool:
        """No worker is left, and none will be started."""
        return not self._processes and (self._ending or self.finished)

    # Facts.

    def resize(self, target: int, leaving: Collection[int] = (), *, now: float) -> None:
        """From now on there should be `target` workers, without these."""
        self.target = target
        for member in leaving:
            self._leave(member, now + self.policy.grace_s)

    def started(self, member: int) -> None:
        """It has begun its first loop."""
        if member in self._processes:
            self._processes[member].trains = True

    def reported_failure(self, member: int, message: Failed) -> None:
        if member in self._processes:
            self._processes[member].failed = message

    def reported_end(self, member: int, message: WorkerEnded) -> None:
        if member in self._processes:
            self._processes[member].ended = message

    def kill(self, member: int, why: str) -> list[Order]:
        """The job itself kills a worker: it does not answer, or must leave its device now."""
        if member not in self._processes:
            return []
        self._processes[member].killed = why
        return [SignalMember(member, signal.SIGKILL)]

    def end(self, now: float, *, at_once: bool = False) -> None:
        """The job ends: nobody is started any more, and all leave."""
        self._ending = True
        until = now if at_once else now + KILL_GRACE_S
        for process in self._processes.values():
            process.leave_by = min(process.leave_by or until, until)

    def exited(
        self, member: int, code: int, evidence: Evidence, held: ShardInHand | None, updates: int, now: float
    ) -> WorkerExit:
        """A process has ended. `code`: its exit code, or the negated signal; `held`: the shard that it had; `updates`: of the
        job so far."""
        process = self._processes.pop(member)
        self.codes[member] = code
        if process.failed is not None and not self._ending:
            return self._fails(member, _raised(member, process.failed, evidence), evidence)
        if code == 0 and process.ended is not None:
            if process.ended.left or process.ended.stopped:
                return WorkerExit(member, WorkerFate.LEFT, "left")
            self.finished = True
            return WorkerExit(member, WorkerFate.FINISHED, "finished its script")
        if self._ending or process.leave_by is not None:
            return WorkerExit(member, WorkerFate.LEFT, process.killed or describe_exit(code))
        if code > 0:
            failure = JobFailure(
                worker=member,
                cause=FailureCause.EXITED,
                summary=f"exited with code {code}",
                exit_code=code,
                evidence=evidence,
            )
            return self._fails(member, failure, evidence)
        return self._dies(process, member, code, evidence, held, updates, now)

    def _dies(
        self,
        process: _Process,
        member: int,
        code: int,
        evidence: Evidence,
        held: ShardInHand | None,
        updates: int,
        now: float,
    ) -> WorkerExit:
        how = process.killed or ("exited before its script had ended" if code == 0 else describe_exit(code))
        lines = (*evidence.describe(), *((f"it held the {held}",) if held is not None else ()))
        if evidence.out_of_memory is not None:
            summary = f"{how}: out of memory ({evidence.out_of_memory})"
            return self._fails(member, _dead(member, FailureCause.MEMORY, summary, code, evidence), evidence)
        if process.killed is None and code < 0:
            self._shard_deaths.append(ShardDeath(member=member, shard=held, running=evidence.running))
            if (poison := poison_shard(self._shard_deaths, self.policy.poison_limit)) is not None:
                summary = f"{how}; {self.policy.poison_limit} workers have died of the same work: {poison}"
                return self._fails(
                    member, _dead(member, FailureCause.POISON, summary, code, evidence), evidence
                )
        self.deaths += 1
        if self.finished:
            return WorkerExit(member, WorkerFate.DIED, how, lines)
        self._in_vain = 0 if updates > process.updates else self._in_vain + 1
        if self._in_vain > self.policy.restarts:
            summary = f"{how}; {self._in_vain} workers in a row have died without progress of the job"
            return self._fails(member, _dead(member, FailureCause.KILLED, summary, code, evidence), evidence)
        self._start_at = now + DELAY.after(self._in_vain)
        return WorkerExit(member, WorkerFate.DIED, how, lines)

    def _fails(self, member: int, failure: JobFailure, evidence: Evidence) -> WorkerExit:
        self.failure = self.failure or failure
        return WorkerExit(member, WorkerFate.FAILED, failure.summary, tuple(evidence.describe()))

    def _leave(self, member: int, until: float) -> None:
        process = self._processes.get(member)
        if process is not None:
            process.leave_by = min(process.leave_by or until, until)

    # What to do.

    def orders(self, updates: int, now: float) -> list[Order]:
        """What leads from the present workers to those that there should be. `updates`: of the job so far."""
        if self.failure is not None and not self._ending:
            self.end(now)
        done: list[Order] = []
        if not self._ending:
            for member in self._excess():
                self._leave(member, now + self.policy.grace_s)
            if not self.finished and now >= self._start_at:
                done += [self._start(updates) for _ in range(self.target - len(self.members))]
        return done + self._leave_orders(now)

    def _start(self, updates: int) -> StartMember:
        member, self._next = self._next, self._next + 1
        self._processes[member] = _Process(updates)
        return StartMember(member)

    def _excess(self) -> Sequence[int]:
        """The newest leave: they have the least warm caches."""
        members = self.members
        return members[max(0, self.target) :]

    def _leave_orders(self, now: float) -> list[Order]:
        done: list[Order] = []
        for member, process in self._processes.items():
            if process.leave_by is None or process.killed is not None:
                continue
            if now >= process.leave_by:
                process.killed = "was killed: it had not left within its grace"
                done.append(SignalMember(member, signal.SIGKILL))
            elif not process.asked:
                process.asked = True
                done.append(SignalMember(member, signal.SIGTERM))
        return done

    def deadline(self, now: float) -> float | None:
        """When `orders` has something to do by itself."""
        times = [
            process.leave_by
            for process in self._processes.values()
            if process.leave_by is not None and process.killed is None
        ]
        waits = not self._ending and not self.finished and self.target > len(self.members)
        if waits and self._start_at > now:
            times.append(self._start_at)
        return min(times, default=None)


def _raised(member: int, message: Failed, evidence: Evidence) -> JobFailure:
    refused = message.kind is FailureKind.REFUSED
    return JobFailure(
        worker=member,
        cause=FailureCause.REFUSED if refused else FailureCause.RAISED,
        summary=message.summary if refused else f"raised {message.summary}",
        traceback=None if refused else message.traceback,
        exit_code=2 if message.kind in (FailureKind.USAGE, FailureKind.REFUSED) else 1,
        evidence=evidence,
    )


def _dead(member: int, cause: FailureCause, summary: str, code: int, evidence: Evidence) -> JobFailure:
    return JobFailure(
        worker=member,
        cause=cause,
        summary=summary,
        exit_code=128 - code if code < 0 else 1,
        evidence=evidence,
    )

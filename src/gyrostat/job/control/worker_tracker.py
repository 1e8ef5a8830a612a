"""Which worker failed, and what to do with the others: decided purely, carried out by `leader`.

Facts go in (a worker reported a failure, a worker exited, the user sent a signal), signals to send come out, with time as an
argument. Three rules:

1. A worker whose peer was lost fails too, often before the peer's exit is known. So a lost peer is blamed only if no other
   failure is found for some time.
2. A worker that ends because it was sent a signal, by the leader or the user, has not failed.
3. The first stop signal is passed on, and workers may take their time to reach a boundary and checkpoint; if they do not
   checkpoint, or have not begun, they are killed after a grace period. The second stop signal kills.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gyrostat.core.evidence import NO_EVIDENCE, Evidence
from gyrostat.core.roles import ProcessRole
from gyrostat.job.diagnostics.poison import LIMIT, Death, poison
from gyrostat.job.processes.protocol import Failed, FailureKind, WorkerEnded

BLAME_GRACE_S = 2.0
KILL_GRACE_S = 5.0
_NO_BOUNDARY = "was asked to leave by SIGTERM, and no boundary to leave at came within its grace"


class FailureCause(StrEnum):
    """How a worker failed, the most specific first."""

    RAISED = "raised"
    REFUSED = "refused"
    """The job cannot use what it was given, such as another job's checkpoint."""
    EXITED = "exited"
    KILLED = "killed"
    POISON = "poison"
    """Killed, like others before it, while it ran a certain micro-batch."""
    LOST = "lost"
    """Out of reach: its agent is away, or has not started it."""
    MEMORY = "out of memory"
    VANISHED = "vanished"
    """Exited with code 0 before its script had ended."""
    PEER_LOST = "peer lost"
    ORPHANED = "orphaned"
    """Stopped the job, with a checkpoint, because its agent was away."""


RESTARTABLE = (
    FailureCause.KILLED,
    FailureCause.LOST,
    FailureCause.VANISHED,
    FailureCause.PEER_LOST,
    FailureCause.ORPHANED,
)
"""Not the script's fault: another attempt may succeed."""
DEATHS = (
    FailureCause.EXITED,
    FailureCause.KILLED,
    FailureCause.POISON,
    FailureCause.LOST,
    FailureCause.MEMORY,
    FailureCause.VANISHED,
)
"""The worker itself has died, and not because its script raised."""
_MOST_SPECIFIC = (
    (FailureCause.POISON, FailureCause.MEMORY),
    (FailureCause.RAISED, FailureCause.REFUSED, FailureCause.EXITED, FailureCause.KILLED, FailureCause.LOST),
    (FailureCause.VANISHED,),
    (FailureCause.PEER_LOST,),
)


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why a run failed, and which worker caused it."""

    worker: int
    cause: FailureCause
    summary: str
    """One line."""
    traceback: str | None = None
    exit_code: int = 1
    """The exit code of the command."""
    evidence: Evidence = NO_EVIDENCE
    """What is known of its last moments."""
    role: ProcessRole = ProcessRole.WORKER
    """SERVER: the job's parameter servers failed; `worker` has no meaning."""

    def __str__(self) -> str:
        whole = self.cause is FailureCause.REFUSED or self.role is ProcessRole.SERVER
        return self.summary if whole else f"worker {self.worker} {self.summary}"


@dataclass(frozen=True)
class SendSignal:
    """Send this signal to these workers."""

    signal: int
    workers: tuple[int, ...]


@dataclass
class WorkerTracker:
    """The workers of one attempt. `checkpoints`: they stop at a boundary when requested."""

    members: list[int]
    """All that have been members, those included that have left; new workers only when they have joined."""
    checkpoints: bool
    deaths: list[Death] = field(default_factory=list)
    """Those of earlier attempts included."""
    poison_limit: int = LIMIT
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes."""
    _judged: dict[int, tuple[FailureCause, str]] = field(default_factory=dict)
    recovered_without: dict[int, int] = field(default_factory=dict)
    """Exit codes of members that died and from whose loss the others recovered."""
    stopped_by: int | None = None
    """The signal by which the user asked to stop."""
    stopped: bool = False
    """Some worker left early at a boundary."""
    _left: set[int] = field(default_factory=set)
    """Workers that have left the job at a fence."""
    _training: bool = False
    _checkpoint_asked: bool = False
    _reported: set[int] = field(default_factory=set)
    _suspects: list[JobFailure] = field(default_factory=list)
    _decide_at: float | None = None
    _kill_at: float | None = None
    _leave_by: dict[int, tuple[float, str]] = field(default_factory=dict)
    _overdue: dict[int, str] = field(default_factory=dict)
    """Workers that are killed because they have not left in time, and what to say of it."""
    _terminated: bool = False
    _hung: dict[int, str] = field(default_factory=dict)
    _evidence: dict[int, Evidence] = field(default_factory=dict)

    @property
    def living(self) -> tuple[int, ...]:
        return tuple(worker for worker in self.members if worker not in self.codes)

    @property
    def over(self) -> bool:
        return not self.living

    def deadline(self) -> float | None:
        """When `orders` must be asked again, even if nothing happens."""
        deadlines = (self._decide_at, self._kill_at, *(until for until, _ in self._leave_by.values()))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def failed(self, worker: int, message: Failed, now: float) -> None:
        """A worker's script raised."""
        self._reported.add(worker)
        cause, verb = {
            FailureKind.PEER_LOST: (FailureCause.PEER_LOST, "lost a peer: "),
            FailureKind.REFUSED: (FailureCause.REFUSED, ""),
        }.get(message.kind, (FailureCause.RAISED, "raised "))
        failure = JobFailure(
            worker=worker,
            cause=cause,
            summary=verb + message.summary,
            traceback=None if cause is FailureCause.REFUSED else message.traceback,
            exit_code=2 if message.kind in (FailureKind.USAGE, FailureKind.REFUSED) else 1,
        )
        self._suspect(failure, now)

    def joined(self, workers: Sequence[int]) -> None:
        """These are members from now on."""
        self.members += workers

    def gave_up(self, reason: str, now: float) -> None:
        """The job cannot continue, and no worker caused it."""
        if self.over:
            return
        self._suspect(
            JobFailure(worker=self.living[0], cause=FailureCause.EXITED, summary=f"cannot go on: {reason}"),
            now,
        )

    def ended(self, worker: int, message: WorkerEnded) -> None:
        """A worker reports that it ends as intended."""
        self._reported.add(worker)
        self.stopped |= message.stopped
        if message.left:
            self._left.add(worker)
        if message.stopped and self.stopped_by is None and not self._terminated:
            self.stopped_by = message.asked_by  # directly, or by the leader before this one

    def leaving(self, worker: int, until: float, otherwise: str = _NO_BOUNDARY) -> None:
        """A worker will leave at a boundary; if it has not by `until`, it is killed. `otherwise`: what to say of it then."""
        self._leave_by[worker] = min(self._leave_by.get(worker, (until, otherwise)), (until, otherwise))

    def hangs(self, where: Mapping[int, str]) -> list[SendSignal]:
        """These workers hang and block the job: they are killed."""
        self._hung |= where
        return [SendSignal(signal.SIGKILL, tuple(where))]

    def exited(self, worker: int, code: int, now: float, evidence: Evidence | None = None) -> None:
        """A worker has exited. `code`: its exit code, or the negated signal that killed it."""
        self.codes[worker] = code
        self._evidence[worker] = evidence = evidence or NO_EVIDENCE
        self._leave_by.pop(worker, None)
        if self._terminated or (self.stopped_by is not None and code != 0):
            return
        if code < 0:
            judged = self._judged.get(worker)
            cause, summary = judged or self._why_killed(worker, code, evidence)
            self._suspect(JobFailure(worker=worker, cause=cause, summary=summary, exit_code=128 - code), now)
        elif worker in self._reported:
            return
        elif code > 0:
            failure = JobFailure(
                worker=worker, cause=FailureCause.EXITED, summary=f"exited with code {code}", exit_code=code
            )
            self._suspect(failure, now)
        else:
            self._suspect(
                JobFailure(
                    worker=worker, cause=FailureCause.VANISHED, summary="exited before its script had ended"
                ),
                now,
            )

    def _why_killed(self, worker: int, code: int, evidence: Evidence) -> tuple[FailureCause, str]:
        """The cause of a kill from outside. A worker that took over its work may die of it, too."""
        summary = describe_exit(code)
        if worker in self._overdue:
            return FailureCause.KILLED, self._overdue[worker]
        if worker in self._hung:
            summary = f"was ended by the watchdog: it hung at {self._hung[worker]}"
        elif evidence.out_of_memory is not None:
            return FailureCause.MEMORY, f"{summary}: out of memory ({evidence.out_of_memory})"
        self.deaths.append(Death(member=worker, how=summary, running=evidence.running))
        running = poison(self.deaths, self.poison_limit)
        if running is None:
            return FailureCause.KILLED, summary
        again = f"{self.poison_limit} workers have died while this micro-batch was running"
        return FailureCause.POISON, f"{summary}; {again}: {running}"

    def recoverable_death(self, worker: int, code: int, evidence: Evidence | None) -> str | None:
        """How a worker has died, if the others can recover; None if they must not: the job is being stopped, or a worker
        that took over its work would die of it, too."""
        if not self._is_recoverable(worker) or code > 0:
            return None
        self._evidence[worker] = evidence or NO_EVIDENCE
        if code == 0:
            return "exited before its script had ended"
        cause, summary = self._judged[worker] = self._why_killed(worker, code, evidence or NO_EVIDENCE)
        return summary if cause is FailureCause.KILLED else None

    def _is_recoverable(self, worker: int) -> bool:
        stops = self.stopped_by is not None and not (self.checkpoints and self._training)
        return worker in self.members and worker not in self._reported and not (self._terminated or stops)

    @property
    def ends(self) -> bool:
        """A worker has failed, and all others must end."""
        return self._terminated

    def evidence_of(self, workers: Sequence[int]) -> tuple[str, ...]:
        """The evidence of these workers."""
        return tuple(
            line
            for worker in workers
            if worker in self._evidence
            for line in self._evidence[worker].describe()
        )

    def recover_without(self, worker: int, code: int) -> None:
        """The others recover without this member."""
        self.members.remove(worker)
        self.recovered_without[worker] = code
        self._leave_by.pop(worker, None)

    def lost(self, worker: int, why: str, now: float) -> None:
        """A worker is out of reach, and counts as lost."""
        self.codes[worker] = -signal.SIGKILL
        if not self._terminated and self.stopped_by is None:
            self._suspect(JobFailure(worker=worker, cause=FailureCause.LOST, summary=f"was lost: {why}"), now)

    def began(self) -> list[SendSignal]:
        """Training has begun: from now on a checkpoint can be requested."""
        self._training = True
        return self._ask_for_checkpoint() if self._checkpoint_asked else []

    def signalled(self, number: int, now: float) -> list[SendSignal]:
        """The user has sent a signal: pass it on, or, if it is the second stop signal, kill."""
        if number == signal.SIGUSR1:
            self._checkpoint_asked = True
            return self._ask_for_checkpoint() if self._training else []
        if self.stopped_by is not None:
            self._kill_at = None
            return [SendSignal(signal.SIGKILL, self.living)]
        self.stopped_by = number
        if not (self.checkpoints and self._training):
            self._kill_at = now + KILL_GRACE_S
        return [SendSignal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, self.living)]

    def _ask_for_checkpoint(self) -> list[SendSignal]:
        """One worker only, which informs the others: two would make two checkpoints."""
        self._checkpoint_asked = False
        return [SendSignal(signal.SIGUSR1, self.living[:1])]

    def orders(self, now: float) -> list[SendSignal]:
        """The signals to send now: end the others after a failure, and kill workers that do not end."""
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            return [SendSignal(signal.SIGKILL, self.living)]
        overdue = {worker: why for worker, (until, why) in self._leave_by.items() if now >= until}
        if overdue:
            for worker in overdue:
                del self._leave_by[worker]
            self._overdue |= overdue
            return [SendSignal(signal.SIGKILL, tuple(overdue))]
        if not self._terminated and self._decided(now):
            self._terminated = True
            self._decide_at = None
            self._kill_at = now + KILL_GRACE_S
            others = tuple(worker for worker in self.living if worker not in self._reported)
            return [SendSignal(signal.SIGTERM, others)] if others else []
        if self._decide_at is not None and now >= self._decide_at:
            self._decide_at = None  # no worker misses the one that vanished
        return []

    def failure(self) -> JobFailure | None:
        """The failure to report: the first worker that failed by itself, else one that vanished, else one that lost a peer."""
        for causes in _MOST_SPECIFIC:
            for failure in self._suspects:
                if failure.cause in causes and not self._excused(failure):
                    # Nobody was lost: the script itself ended its process, and would do so again.
                    by_itself = failure.cause is FailureCause.VANISHED and not self._peer_lost
                    cause = FailureCause.EXITED if by_itself else failure.cause
                    evidence = self._evidence.get(failure.worker, NO_EVIDENCE)
                    return replace(failure, cause=cause, evidence=evidence)
        return None

    def without_result(self) -> JobFailure | None:
        """All workers have ended in good order, none of them with the result, and nobody had asked for it: they have left at a
        fence, and those that were to go on have died before they could; or they have stopped the job at a boundary."""
        if self.members and self._left.issuperset(self.members):
            summary = "has left the job, and no worker that was to go on without it is left"
            return JobFailure(worker=self.members[-1], cause=FailureCause.LOST, summary=summary)
        if not self.stopped or self.stopped_by is not None:
            return None
        summary = "stopped the job, because its agent was away"
        return JobFailure(worker=min(self.codes), cause=FailureCause.ORPHANED, summary=summary)

    def _excused(self, failure: JobFailure) -> bool:
        """A worker that vanished has failed if another one lost a peer, or if no worker is left: then no script has reached its
        end. After a stop signal, a lost peer is no failure."""
        if failure.cause is FailureCause.VANISHED:
            return not self._peer_lost and (bool(self.living) or self.stopped_by is not None)
        return failure.cause is FailureCause.PEER_LOST and self.stopped_by is not None

    @property
    def _peer_lost(self) -> bool:
        return any(failure.cause is FailureCause.PEER_LOST for failure in self._suspects)

    def _suspect(self, failure: JobFailure, now: float) -> None:
        self._suspects.append(failure)
        if self._decide_at is None and not self._terminated:
            self._decide_at = now + BLAME_GRACE_S

    def _decided(self, now: float) -> bool:
        failure = self.failure()
        if failure is None:
            return False
        if failure.cause in (FailureCause.VANISHED, FailureCause.PEER_LOST):
            return self._decide_at is not None and now >= self._decide_at
        return True


def describe_exit(code: int) -> str:
    return f"exited with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

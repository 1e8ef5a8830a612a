"""Who failed, and what to do about the others: decided purely, carried out by `launcher`.

Facts go in (a worker said it failed, a worker exited, the user sent a signal), orders come out (send these
workers that signal), with time as an argument. Three things make it more than a loop:

1. A worker whose peer went away fails too, often sooner than the news of the peer's death arrives. So a lost
   peer is only blamed when, some time later, nobody else has turned up who could be.
2. What dies because we or the user signalled it has not failed.
3. The first stop signal is passed on and workers may take their time, to reach a boundary and checkpoint; if
   they do not checkpoint, or have not begun, they have a grace. The second one kills.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gyrostat.core.evidence import NO_EVIDENCE, Evidence
from gyrostat.job.diagnostics.poison import LIMIT, Death, poison
from gyrostat.job.processes.protocol import Failed, FailureKind, WorkerEnded

BLAME_GRACE_S = 2.0
KILL_GRACE_S = 5.0


class FailureCause(StrEnum):
    """How a worker failed, the most telling first."""

    RAISED = "raised"
    EXITED = "exited"
    KILLED = "killed"
    POISON = "poison"
    """Killed, as others were before it, while it ran a certain micro-batch."""
    MEMORY = "out of memory"
    VANISHED = "vanished"
    """Left with exit code 0, but without a word and before the others."""
    PEER_LOST = "peer lost"
    ORPHANED = "orphaned"
    """Stopped the job, with a checkpoint, because its agent was away."""


_MOST_TELLING = (
    (FailureCause.POISON, FailureCause.MEMORY),
    (FailureCause.RAISED, FailureCause.EXITED, FailureCause.KILLED),
    (FailureCause.VANISHED,),
    (FailureCause.PEER_LOST,),
)


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why a run failed, and which worker is to blame."""

    worker: int
    cause: FailureCause
    summary: str
    """One line: what happened."""
    traceback: str | None = None
    exit_code: int = 1
    """What the command line returns for it."""
    evidence: Evidence = NO_EVIDENCE
    """What it left behind."""

    def __str__(self) -> str:
        return f"worker {self.worker} {self.summary}"


@dataclass(frozen=True)
class SendSignal:
    """Send this signal to these workers."""

    signal: int
    workers: tuple[int, ...]


@dataclass
class WorkerTracker:
    """The state of a crew of workers. `checkpoints`: they stop at a boundary when asked to."""

    crew: list[int]
    """Whom the job needs. Who is about to join does not count, and who has left has."""
    checkpoints: bool
    deaths: list[Death] = field(default_factory=list)
    """Those of earlier attempts included."""
    poison_limit: int = LIMIT
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of those that have exited."""
    _judged: dict[int, tuple[FailureCause, str]] = field(default_factory=dict)
    spared: dict[int, int] = field(default_factory=dict)
    """Exit codes of those that have died, and without which the others went on."""
    stopped_by: int | None = None
    """The signal by which the user asked to stop."""
    stopped: bool = False
    """Some worker left early at a boundary."""
    _training: bool = False
    _checkpoint_asked: bool = False
    _told: set[int] = field(default_factory=set)
    _suspects: list[JobFailure] = field(default_factory=list)
    _decide_at: float | None = None
    _kill_at: float | None = None
    _leave_by: dict[int, float] = field(default_factory=dict)
    _overdue: set[int] = field(default_factory=set)
    _terminated: bool = False
    _hung: dict[int, str] = field(default_factory=dict)
    _evidence: dict[int, Evidence] = field(default_factory=dict)

    @property
    def living(self) -> tuple[int, ...]:
        return tuple(worker for worker in self.crew if worker not in self.codes)

    @property
    def over(self) -> bool:
        return not self.living

    def deadline(self) -> float | None:
        """When `orders` must be asked again, even if nothing happens."""
        deadlines = (self._decide_at, self._kill_at, *self._leave_by.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def failed(self, worker: int, message: Failed, now: float) -> None:
        """A worker's script raised."""
        self._told.add(worker)
        lost_peer = message.kind is FailureKind.PEER_LOST
        failure = JobFailure(
            worker=worker,
            cause=FailureCause.PEER_LOST if lost_peer else FailureCause.RAISED,
            summary=f"lost a peer: {message.summary}" if lost_peer else f"raised {message.summary}",
            traceback=message.traceback,
            exit_code=2 if message.kind is FailureKind.USAGE else 1,
        )
        self._suspect(failure, now)

    def joined(self, workers: Sequence[int]) -> None:
        """These belong to the job from now on."""
        self.crew += workers

    def gave_up(self, reason: str, now: float) -> None:
        """The job cannot go on, through no worker's fault."""
        self._suspect(
            JobFailure(worker=self.living[0], cause=FailureCause.EXITED, summary=f"cannot go on: {reason}"),
            now,
        )

    def ended(self, worker: int, message: WorkerEnded) -> None:
        """A worker says that it leaves in good order."""
        self._told.add(worker)
        self.stopped |= message.stopped
        if message.stopped and self.stopped_by is None and not self._terminated:
            self.stopped_by = message.asked_by  # directly, or by the leader before this one

    def leaving(self, worker: int, until: float) -> None:
        """A worker will leave at a boundary; if that does not come in time, it is killed."""
        self._leave_by.setdefault(worker, until)

    def hangs(self, where: Mapping[int, str]) -> list[SendSignal]:
        """Nothing goes on because these workers hang: they are ended."""
        self._hung |= where
        return [SendSignal(signal.SIGKILL, tuple(where))]

    def exited(self, worker: int, code: int, now: float, evidence: Evidence | None = None) -> None:
        """A worker has gone: its exit code, or the negated signal that killed it."""
        self.codes[worker] = code
        self._evidence[worker] = evidence = evidence or NO_EVIDENCE
        self._leave_by.pop(worker, None)
        if self._terminated or (self.stopped_by is not None and code != 0):
            return
        if code < 0:
            judged = self._judged.get(worker)
            cause, summary = judged or self._why_killed(worker, code, evidence)
            self._suspect(JobFailure(worker=worker, cause=cause, summary=summary, exit_code=128 - code), now)
        elif worker in self._told:
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
        """Somebody was killed through no fault of ours. It may be that whoever takes over its work would be, too."""
        summary = f"was killed by {signal.Signals(-code).name}"
        if worker in self._overdue:
            return (
                FailureCause.KILLED,
                "was asked to leave by SIGTERM, and no boundary to leave at came within its grace",
            )
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

    def why_spared(self, worker: int, code: int, evidence: Evidence | None) -> str | None:
        """How a worker has died, if the others may go on without it.

        Not if somebody wants the job to end, nor if whoever took over its work would die of it, too.
        """
        if not self._can_be_spared(worker) or code > 0:
            return None
        self._evidence[worker] = evidence or NO_EVIDENCE
        if code == 0:
            return "exited before its script had ended"
        cause, summary = self._judged[worker] = self._why_killed(worker, code, evidence or NO_EVIDENCE)
        return summary if cause is FailureCause.KILLED else None

    def _can_be_spared(self, worker: int) -> bool:
        stops = self.stopped_by is not None and not (self.checkpoints and self._training)
        return worker in self.crew and worker not in self._told and not (self._terminated or stops)

    @property
    def ends(self) -> bool:
        """Somebody has failed, and all others are to end."""
        return self._terminated

    def told_of(self, workers: Sequence[int]) -> tuple[str, ...]:
        """The evidence that these have left behind."""
        return tuple(
            line for worker in workers if worker in self._evidence for line in self._evidence[worker].told()
        )

    def spare(self, worker: int, code: int) -> None:
        """The others go on without it."""
        self.crew.remove(worker)
        self.spared[worker] = code
        self._leave_by.pop(worker, None)

    def lost(self, worker: int, why: str, now: float) -> None:
        """A worker is out of reach, and given up."""
        self.codes[worker] = -signal.SIGKILL
        if not self._terminated and self.stopped_by is None:
            self._suspect(
                JobFailure(worker=worker, cause=FailureCause.KILLED, summary=f"was lost: {why}"), now
            )

    def began(self) -> list[SendSignal]:
        """Training has begun: from now on there are boundaries, and a checkpoint can be asked for."""
        self._training = True
        return self._ask_for_checkpoint() if self._checkpoint_asked else []

    def asked(self, number: int, now: float) -> list[SendSignal]:
        """The user sent us a signal: pass it on, or, if it is the second one that asks to stop, kill."""
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
        """One worker, and the engine tells the others: two that were asked would make two checkpoints."""
        self._checkpoint_asked = False
        return [SendSignal(signal.SIGUSR1, self.living[:1])]

    def orders(self, now: float) -> list[SendSignal]:
        """What is to be done now: end the others once somebody has failed, and kill who does not end."""
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            return [SendSignal(signal.SIGKILL, self.living)]
        overdue = tuple(worker for worker, until in self._leave_by.items() if now >= until)
        if overdue:
            for worker in overdue:
                del self._leave_by[worker]
            self._overdue |= set(overdue)
            return [SendSignal(signal.SIGKILL, overdue)]
        if not self._terminated and self._decided(now):
            self._terminated = True
            self._decide_at = None
            self._kill_at = now + KILL_GRACE_S
            others = tuple(worker for worker in self.living if worker not in self._told)
            return [SendSignal(signal.SIGTERM, others)] if others else []
        if self._decide_at is not None and now >= self._decide_at:
            self._decide_at = None  # nobody misses the one that vanished
        return []

    def failure(self) -> JobFailure | None:
        """Whom to blame: the first one that failed by itself, else one that vanished, else one that lost a
        peer.
        """
        for causes in _MOST_TELLING:
            for failure in self._suspects:
                if failure.cause in causes and not self._excused(failure):
                    return replace(failure, evidence=self._evidence.get(failure.worker, NO_EVIDENCE))
        return None

    def orphaned(self) -> JobFailure | None:
        """All workers have stopped the job at a boundary, and nobody had asked for it."""
        if not self.stopped or self.stopped_by is not None:
            return None
        summary = "stopped the job, because its agent was away"
        return JobFailure(worker=min(self.codes), cause=FailureCause.ORPHANED, summary=summary)

    def _excused(self, failure: JobFailure) -> bool:
        """A worker that leaves without a word fails only if another misses it; after a stop, nobody is to be
        blamed for missing somebody.
        """
        if failure.cause is FailureCause.VANISHED:
            return all(other.cause is not FailureCause.PEER_LOST for other in self._suspects)
        return failure.cause is FailureCause.PEER_LOST and self.stopped_by is not None

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

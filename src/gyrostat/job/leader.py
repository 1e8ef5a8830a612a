"""One job led from its start to its end: which workers it consists of, what they are told, and what came of it.

A `Leader` lives in an agent's loop. What happens goes in (`heard`, `exited`, `asked`, `signalled`, `tick`); what is to be done
is decided by `coordinator` (generations) and `watch` (who failed, who is to be ended) and carried out by its `Hands`, wherever
the workers are. `outcome` is there when the job is over.

A job may be started several times: a start is an attempt. The next one begins from the newest checkpoint, after a worker has
died through no fault of the script's, or when a job that was scaled to zero is wanted again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from gyrostat.core.evidence import Evidence
from gyrostat.core.job import Assignment
from gyrostat.core.placement import Placement
from gyrostat.job.coordinator import (
    Change,
    Coordinator,
    CoordinatorRecord,
    Done,
    End,
    GiveUp,
    Instruction,
    Noticed,
    Profiled,
    Refused,
    Rescued,
    Start,
    Tell,
)
from gyrostat.job.door import (
    Answer,
    AskCheckpoint,
    AskStatus,
    AskStop,
    Migrate,
    Occupy,
    Profile,
    ProfileTable,
    Request,
    Scale,
    ScaleBy,
    Status,
)
from gyrostat.job.observer import Observer
from gyrostat.job.outcome import Outcome, Tally
from gyrostat.job.poison import Death
from gyrostat.job.profiling import ProfileWish
from gyrostat.job.protocol import (
    Ended,
    Failed,
    FailureKind,
    FromWorker,
    Leaving,
    Lost,
    Ping,
    Prepared,
    Ready,
    Recovered,
    Seat,
    Stacks,
    Started,
    Steps,
    Switched,
    Terminate,
)
from gyrostat.job.reception import Asker, Reception, Result
from gyrostat.job.request import FIRST_GENERATION, RunRequest
from gyrostat.job.restarts import Restarts
from gyrostat.job.seating import Slot
from gyrostat.job.sharding import OpenShards, Pulled, PullShard, QueuesRecord, ShardDesk
from gyrostat.job.silence import Silence
from gyrostat.job.stacks import SIGNAL as STACKS_SIGNAL
from gyrostat.job.stragglers import Pace
from gyrostat.job.watch import Cause, Order, Watch
from gyrostat.job.watchdog import Watchdog

_NOWHERE = "the job has nowhere to checkpoint: it was started without --checkpoint-dir"
_RETRY_S = 0.25
_DIED = (Cause.KILLED, Cause.VANISHED, Cause.PEER_LOST)


class Hands(Protocol):
    """Carries out what a leader decides."""

    def start(self, seat: Seat, assignment: Assignment) -> None:
        """Start a worker."""

    def tell(self, seat: Seat, message: msgspec.Struct) -> None:
        """Nothing happens if it has gone; that will be heard of."""

    def signal(self, seat: Seat, number: int) -> None: ...

    def store(self, attempt: int, generation: int) -> str:
        """Where the members of a generation find one another."""

    def traces(self, attempt: int) -> Path | None:
        """Where workers put their parts of a trace."""

    def keep(self, record: Callable[[], Record]) -> bool:
        """Keep the record for the next leader, if there can be one. False: that is not possible now."""


@dataclass
class _Attempt:
    """One start of the job."""

    number: int
    request: RunRequest
    watch: Watch
    coordinator: Coordinator


class Wanted(msgspec.Struct, frozen=True):
    """A change to or from no workers at all."""

    request: str
    workers: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the next leader cannot learn from the workers."""

    format: int = 1
    attempt: int
    restarts: Restarts
    restarting: bool
    """It has no workers, and will be started again when its time has come."""
    deaths: tuple[Death, ...]
    virtual_workers: int
    placement: Placement
    """As the attempt began, or as the suspended job last was."""
    schedule: tuple[tuple[int, int], ...]
    coordinator: CoordinatorRecord | None
    """None: the job is suspended, or has not begun."""
    step: int
    """Complete when it was suspended."""
    suspending: Wanted | None
    resuming: Wanted | None
    answered: dict[str, Result]
    shards: dict[str, QueuesRecord]


@dataclass(frozen=True)
class _Launch:
    """Start a worker that the attempt begins with."""

    member: int


@dataclass(frozen=True)
class _Keep:
    """There is nothing to be done, but the next leader must know what has changed."""


@dataclass(frozen=True)
class _Reply:
    request: str | None
    answer: Result


@dataclass(frozen=True)
class _Tell:
    """Told when the queues of shards are kept, after all requests of this turn have been taken in."""

    asker: Asker
    reply: Answer | Pulled


_ToDo = Instruction | Order | _Launch | _Keep | _Reply | _Tell


class Leader:
    def __init__(self, request: RunRequest, hands: Hands, observer: Observer) -> None:
        self._request, self._hands, self._observer = request, hands, observer
        crew = request.crew()
        self._tally = Tally(crew.virtual_workers, crew.workers, time.monotonic())
        self._reception = Reception()
        self._shards = ShardDesk()
        self._attempt: _Attempt | None = None
        self._number = -1
        self._deaths: list[Death] = []
        self._silence = Silence(request.silence_s)
        self._complete = False
        """A worker has ended with the result."""
        self._restarts = Restarts(request.restarts)
        self._restart_at: float | None = None
        self._next: RunRequest | None = None
        """What is run then."""
        self._suspending: Wanted | None = None
        self._resuming: Wanted | None = None
        self._since = time.monotonic()
        """When that was asked for."""
        self._suspended_at = 0
        self._watchdog = Watchdog(request.watchdog) if request.watchdog is not None else None
        self._codes: dict[int, int] = {}
        self._curious: list[Asker] = []
        """Who wants to be told when the first step is done."""
        self._to_do: list[_ToDo] = []
        self.outcome: Outcome | None = None

    # What happens.

    def begin(self) -> None:
        """Start the job."""
        self._begin(self._request)

    def take_over(self, record: Record) -> None:
        """Go on where another leader left off; what workers know, they will say again."""
        request = replace(self._request, placement=record.placement, schedule=record.schedule)
        self._number, self._deaths, self._restarts = record.attempt, list(record.deaths), record.restarts
        self._suspending, self._resuming = record.suspending, record.resuming
        self._suspended_at = record.step
        self._reception = Reception(record.answered)
        self._shards = ShardDesk.restore(record.shards, time.monotonic())
        self._tally.virtual_workers = record.virtual_workers
        if record.attempt > 0:
            request = request.resuming()
        self._request = request
        if record.restarting:
            self._next, self._restart_at = request, time.monotonic()
            return
        if record.coordinator is None:
            self._tally.workers = 0 if self.has_begun else self._tally.workers
            return
        coordinator = Coordinator.restore(record.coordinator, store=self._store_of(record.attempt))
        coordinator.pace = Pace(request.stragglers)
        coordinator.recovers, coordinator.fewest = request.recovers, request.fewest
        watch = self._watch(coordinator.members, request)
        self._attempt = _Attempt(record.attempt, request, watch, coordinator)
        self._tally.workers = len(coordinator.members)
        now = time.monotonic()
        for member in coordinator.leaving:
            watch.leaving(member, now + request.grace_s)
        if coordinator.training:
            self._obey(watch.began())
        if (pending := coordinator.request()) is not None:
            self._reception.under_way(pending)
        for wanted in (self._suspending, self._resuming):
            if wanted is not None:
                self._reception.under_way(wanted.request)
        if self._suspending is not None:
            self._obey(watch.asked(signal.SIGTERM, now))
        self._carry_out(coordinator.took_over(now))

    @property
    def has_begun(self) -> bool:
        """The job has been started, by this leader or one before."""
        return self._number >= 0

    def heard(self, seat: Seat, message: FromWorker) -> None:
        """A worker reports."""
        attempt = self._current(seat)
        if attempt is None:
            return
        now, member = time.monotonic(), seat.member
        if (
            member in attempt.watch.spared
        ):  # it was given up, and the others have gone on: it may not speak any more
            self._hands.signal(seat, signal.SIGKILL)
            return
        self._silence.heard(member, now)
        self._tally.add(member, message, now)
        self._watch_progress(member, message, now)
        if isinstance(message, Failed):
            if (
                message.kind is FailureKind.PEER_LOST
                and attempt.watch.why_spared(member, 0, None)
                and self._spared(attempt, member, 0, message.summary)
            ):
                return
            if attempt.coordinator.is_newcomer(member):
                self._carry_out(attempt.coordinator.gone(member, f"raised {message.summary}", now))
            elif member in attempt.watch.crew:  # else it was given up, and complains that it lost us
                attempt.watch.failed(member, message, now)
        elif isinstance(message, Ended):
            attempt.watch.ended(member, message)
            if message.left:
                self._carry_out(attempt.coordinator.left(member, now))
            else:
                self._complete |= member in self._tally.finished
                self._carry_out(attempt.coordinator.over())
        elif isinstance(message, Started):
            self._obey(attempt.watch.began())
            self._resumed(message, now)
        self._carry_out(self._coordinate(attempt.coordinator, member, message, now))
        if isinstance(message, Started):  # from now on a death is not the end
            self._carry_out([_Keep()])
        if self._curious and self._tally.steps:
            curious, self._curious = self._curious, []
            for asker in curious:
                asker.answer(self._status())
        self._observer.heard(member, message)

    def exited(self, seat: Seat, code: int, evidence: Evidence | None = None) -> None:
        """A worker's process has ended."""
        attempt = self._current(seat)
        if attempt is None:
            return
        now = time.monotonic()
        if seat.member not in attempt.watch.crew:
            self._carry_out(attempt.coordinator.gone(seat.member, _how(code), now))
        if seat.member in attempt.watch.crew:
            how = attempt.watch.why_spared(seat.member, code, evidence)
            if how is None or not self._spared(attempt, seat.member, code, how):
                attempt.watch.exited(seat.member, code, now, evidence)

    def _spared(self, attempt: _Attempt, member: int, code: int, how: str) -> bool:
        """A member has died. True: the others go on without it."""
        if self._complete:  # all have passed the last reduction, and one has said what came of it
            attempt.watch.spare(member, code)
            for other in attempt.watch.living:
                self._hands.tell(Seat(attempt.number, other), Terminate(final=True))
            return True
        instructions = attempt.coordinator.died((member,), f"worker {member} {how}", time.monotonic())
        if instructions is None:
            return False
        attempt.watch.spare(member, code)
        self._tally.may_repeat()
        self._carry_out(instructions)
        return True

    def lost(self, seat: Seat, why: str) -> None:
        """Nobody knows what has become of a worker, and nobody waits any longer."""
        attempt = self._current(seat)
        if attempt is None:
            return
        now = time.monotonic()
        if seat.member not in attempt.watch.crew:
            self._carry_out(attempt.coordinator.gone(seat.member, why, now))
        if seat.member in attempt.watch.crew:
            spared = attempt.watch.why_spared(seat.member, 0, None) is not None
            if not (spared and self._spared(attempt, seat.member, -signal.SIGKILL, f"was lost: {why}")):
                attempt.watch.lost(seat.member, why, now)

    def back(self, seat: Seat) -> None:
        """A worker can be reached again, whose agent was away."""
        attempt = self._current(seat)
        if attempt is not None:
            self._carry_out(attempt.coordinator.retell(seat.member))

    def signalled(self, number: int) -> None:
        """The user sent us a signal."""
        now = time.monotonic()
        if self._attempt is not None:
            self._obey(self._attempt.watch.asked(number, now))
        elif number != signal.SIGUSR1:  # what a suspended job has to keep, its checkpoint keeps
            self.outcome = self._tally.outcome(
                now=now, exit_codes=self._codes, failure=None, stopped=True, stopped_by=number
            )

    def asked(self, request: Request, asker: Asker) -> None:
        """Somebody wants something of the job."""
        now = time.monotonic()
        match request:
            case AskStatus(after_a_step=True) if not self._tally.steps:
                self._curious.append(asker)
            case AskStatus():
                asker.answer(self._status())
            case AskCheckpoint() | AskStop() if self._request.checkpoint is None:
                asker.answer(Answer(False, _NOWHERE))
            case AskCheckpoint() if self._attempt is None:
                asker.answer(Answer(True, "suspended: its checkpoint holds everything", self._tally.step))
            case AskCheckpoint():
                self.signalled(signal.SIGUSR1)
                asker.answer(Answer(True, "asked for, at the next boundary", self._tally.step))
            case AskStop():
                self.signalled(signal.SIGTERM)
                asker.answer(Answer(True, "asked for, at the next boundary", self._tally.step))
            case PullShard():
                self._to_do.append(_Tell(asker, self._shards.pull(request, now)))
            case OpenShards():
                refusal = self._shards.open(request)
                text = refusal or f"shards of {request.queues} are served"
                self._to_do.append(_Tell(asker, Answer(refusal is None, text)))
            case Scale(request=name, workers=workers) if self._reception.is_new(name, asker):
                self._change(Change(workers=workers, reason="asked for", request=name), now)
            case ScaleBy(request=name, by=by, members=members) if self._reception.is_new(name, asker):
                workers = self._tally.workers + by
                self._change(Change(workers=workers, reason="asked for", request=name, without=members), now)
            case Occupy(request=name, slots=slots) if self._reception.is_new(name, asker):
                self._carry_out([*self._occupy(name, slots, now)])
            case Profile(request=name) if self._reception.is_new(name, asker):
                self._profile(request, now)
            case Migrate(request=name, members=members) if self._reception.is_new(name, asker):
                workers = self._tally.workers
                self._change(
                    Change(workers=workers, reason="asked to migrate", request=name, without=members), now
                )

    def _occupy(self, name: str, slots: tuple[Slot, ...], now: float) -> Sequence[_ToDo]:
        """Run on these devices from the next boundary on. Where workers sit changes only if the change is begun."""
        seating = self._request.seating
        change = Change(workers=len(slots), reason="given other devices", request=name)
        if seating is None:
            return [Refused(change, "this job's devices are nobody's to choose: it was started without any")]
        coordinator = self._attempt.coordinator if self._attempt is not None else None
        if coordinator is not None and slots:
            if (busy := coordinator.busy()) is not None:
                return [Refused(change, busy)]
            change = replace(change, without=seating.aim(slots, coordinator.members))
        elif coordinator is None:
            seating.aim(slots, ())
        self._change(change, now)
        return []

    def _profile(self, request: Profile, now: float) -> None:
        if self._attempt is None or self._suspending is not None:
            reason = "the job is suspended: nothing runs that could be measured"
            self._carry_out([_Reply(request.request, Answer(False, reason, self._tally.step))])
            return
        wish = ProfileWish(
            smallest=request.smallest, largest=request.largest, steps=request.steps, request=request.request
        )
        self._carry_out(self._attempt.coordinator.asked_to_profile(wish, now))

    def free(self, members: Sequence[int]) -> None:
        """The nodes of these workers are wanted for something else: the job goes on without them, or, if there are no others,
        on as many elsewhere. Asked again until it is so."""
        if self._attempt is None or self._suspending is not None:
            return
        coordinator = self._attempt.coordinator
        leaving = tuple(member for member in coordinator.members if member in members)
        if leaving and coordinator.busy() is None:
            workers = len(coordinator.members) - len(leaving) or len(leaving)
            change = Change(workers=workers, reason="a node leaves", without=leaving)
            self._carry_out(coordinator.asked(change, time.monotonic()))

    def tick(self) -> None:
        """Time has passed, or something has happened."""
        self._work_off()
        now = time.monotonic()
        if self._next is not None and self._restart_at is not None and now >= self._restart_at:
            request, self._next, self._restart_at = self._next, None, None
            self._begin(request)
        if self._attempt is None:
            return
        self._obey(self._attempt.watch.orders(now))
        if not self._attempt.watch.ends:
            self._carry_out(self._attempt.coordinator.tick(now))
        self._look_for_silence(self._attempt, now)
        self._look_for_standstill(self._attempt, now)
        if self._attempt.watch.over and not self._to_do:
            self._conclude(self._attempt, now)

    def _look_for_silence(self, attempt: _Attempt, now: float) -> None:
        """Who does not answer is killed, for it may wake up later, and counts as dead at once."""
        if not attempt.coordinator.training or attempt.watch.ends:
            return
        expected = attempt.coordinator.expected
        if len(expected) == 1:
            return  # nobody waits for a lone worker
        asks, silent = self._silence.look(expected, now)
        for member in silent:
            self._hands.signal(Seat(attempt.number, member), signal.SIGKILL)
            self.lost(Seat(attempt.number, member), f"silent for {self._silence.patience:g} s")
        for member in expected if asks else ():
            self._hands.tell(Seat(attempt.number, member), Ping())

    def deadline(self) -> float | None:
        """When `tick` has something to do by itself."""
        silence = self._silence.deadline()
        lost = self._attempt.coordinator.deadline() if self._attempt is not None else None
        watch = self._attempt.watch.deadline() if self._attempt is not None else None
        retry = time.monotonic() + _RETRY_S if self._to_do else None
        standstill = self._watchdog.deadline() if self._watchdog is not None else None
        deadlines = (watch, retry, standstill, silence, lost, self._restart_at)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def stopped_by_workers(self) -> bool:
        """Workers have stopped the job at a boundary, and nobody here had asked for it: their agent was away for too long."""
        watch = self._attempt.watch if self._attempt is not None else None
        return watch is not None and watch.stopped and watch.stopped_by is None

    def close(self) -> None:
        self._reception.close("the job has ended")

    def record(self) -> Record:
        attempt = self._attempt
        request = attempt.request if attempt is not None else self._next or self._request
        return Record(
            attempt=self._number,
            restarts=self._restarts,
            restarting=self._next is not None,
            deaths=tuple(self._deaths),
            virtual_workers=self._tally.virtual_workers,
            placement=request.placement,
            schedule=tuple(request.schedule),
            coordinator=attempt.coordinator.record() if attempt is not None else None,
            step=self._suspended_at,
            suspending=self._suspending,
            resuming=self._resuming,
            answered=self._reception.answered,
            shards=self._shards.record(),
        )

    @property
    def _step(self) -> int:
        """The last complete step that is known of."""
        return max(self._tally.step, self._suspended_at)

    # Standstills.

    def _watch_progress(self, member: int, message: FromWorker, now: float) -> None:
        if self._watchdog is None:
            return
        match message:
            case Started() | Steps():
                self._watchdog.progress(now)
            case Stacks(text=text):
                self._watchdog.answered(member, text)
            case Ended(left=False):
                self._watchdog.rest()

    def _look_for_standstill(self, attempt: _Attempt, now: float) -> None:
        if self._watchdog is None:
            return
        if self._watchdog.asks(attempt.watch.living, now):
            for member in attempt.watch.living:
                self._hands.signal(Seat(attempt.number, member), STACKS_SIGNAL)
        found = self._watchdog.finding(now)
        if found is None:
            return
        self._tally.stood_still(found, now)
        self._observer.stood_still(found)
        if found.ends:
            self._obey(attempt.watch.hangs(found.hanging))

    # Attempts.

    def _begin(self, request: RunRequest) -> None:
        self._number += 1
        placement = request.crew()
        members = tuple(range(placement.workers))
        if request.seating is not None:
            request.seating.begin(len(members))
        self._attempt = _Attempt(
            self._number,
            request,
            self._watch(members, request),
            Coordinator(
                placement.virtual_workers,
                members,
                store=self._store_of(self._number),
                schedule=request.changes(),
                placement=placement,
                pace=Pace(request.stragglers),
                recovers=request.recovers,
                fewest=request.fewest,
            ),
        )
        self._carry_out([_Launch(member) for member in members])

    def _watch(self, members: Sequence[int], request: RunRequest) -> Watch:
        """All attempts share the deaths: what kills one may kill the next."""
        return Watch(
            list(members),
            checkpoints=request.checkpoint is not None,
            deaths=self._deaths,
            poison_limit=request.poison_limit,
        )

    def _store_of(self, attempt: int) -> Callable[[int], str]:
        return lambda generation: self._hands.store(attempt, generation)

    def _current(self, seat: Seat) -> _Attempt | None:
        """What comes from an earlier start of the job does not count."""
        attempt = self._attempt
        return attempt if attempt is not None and attempt.number == seat.attempt else None

    def _conclude(self, attempt: _Attempt, now: float) -> None:
        """All workers of an attempt have gone: that was the job, or it goes on from its newest checkpoint, or later."""
        watch = attempt.watch
        self._codes = watch.codes
        if self._watchdog is not None:
            self._watchdog.rest()
        wanted = attempt.coordinator.wants
        self._carry_out(attempt.coordinator.over())
        outcome = self._tally.outcome(
            now=now,
            exit_codes=watch.codes,
            failure=watch.failure(),
            stopped=watch.stopped,
            stopped_by=watch.stopped_by,
        )
        died = outcome.failure is not None and outcome.failure.cause in _DIED
        if self._suspending is not None and outcome.digest is None and (outcome.failure is None or died):
            self._suspend(now)
        elif died and (wait := self._waits(outcome)) is not None:
            assert outcome.failure is not None
            self._tally.died(outcome.failure, now)
            self._observer.died(outcome.failure, wait)
            self._attempt, self._restart_at = None, now + wait
            self._tally.workers = max(outcome.workers, wanted)
            self._next = attempt.request.again(outcome.virtual_workers, self._tally.workers)
            self.tick()
        else:
            self.outcome = outcome

    def _waits(self, outcome: Outcome) -> float | None:
        """A job that checkpoints loses nothing by a death, unless it happens again and again: the seconds until it is started
        again; None if it is not."""
        if self._request.checkpoint is None or outcome.stopped_by is not None:
            return None
        return self._restarts.died(self._step)

    # Down to zero, and back.

    def _change(self, change: Change, now: float) -> None:
        if not self.has_begun:
            self._carry_out([Refused(change, "the job has not begun yet; retry")])
        elif self._next is not None:
            self._carry_out([Refused(change, "busy: the job is about to be started again; retry")])
        elif self._attempt is None:
            self._resume(change, now)
        elif self._suspending is not None:
            self._carry_out([Refused(change, "busy: the job is being suspended; retry")])
        elif change.workers == 0 and not change.without:
            self._ask_to_suspend(self._attempt, change, now)
        else:
            self._carry_out(self._attempt.coordinator.asked(change, now))

    def _ask_to_suspend(self, attempt: _Attempt, change: Change, now: float) -> None:
        assert change.request is not None
        busy = attempt.coordinator.busy()
        if self._request.checkpoint is None:
            self._carry_out([Refused(change, f"{_NOWHERE}, and without workers a job is its checkpoint")])
        elif busy is not None:
            self._carry_out([Refused(change, busy)])
        else:
            self._suspending, self._since = Wanted(change.request, 0), now
            self._carry_out(attempt.watch.asked(signal.SIGTERM, now))

    def _suspend(self, now: float) -> None:
        assert self._suspending is not None
        wanted, self._suspending, self._attempt = self._suspending, None, None
        self._tally.suspended(now)
        self._suspended_at = self._tally.step
        took = (now - self._since) * 1e3
        text = f"suspended after step {self._step}, until it is given workers again"
        self._carry_out([_Reply(wanted.request, Answer(True, text, self._step, 0, took, took))])

    def _resume(self, change: Change, now: float) -> None:
        tally = self._tally
        if change.without or not 0 <= change.workers <= tally.virtual_workers:
            reason = f"the job is suspended; to go on, ask for 1 to {tally.virtual_workers} workers"
            self._carry_out([_Reply(change.request, Answer(False, reason, self._step))])
        elif change.workers == 0:
            self._carry_out([_Reply(change.request, Answer(True, "suspended already", self._step))])
        else:
            assert change.request is not None
            self._resuming, self._since = Wanted(change.request, change.workers), now
            tally.workers = change.workers
            self._begin(self._request.resumed(tally.virtual_workers, change.workers, self._step))

    def _resumed(self, message: Started, now: float) -> None:
        if self._resuming is None:
            return
        wanted, self._resuming = self._resuming, None
        took = now - self._since
        self._tally.resumed(message.step, now, took)
        text = f"{wanted.workers} workers since step {message.step}"
        answer = Answer(True, text, message.step, wanted.workers, took * 1e3, took * 1e3)
        self._carry_out([_Reply(wanted.request, answer)])

    # Instructions.

    def _coordinate(
        self, coordinator: Coordinator, member: int, message: FromWorker, now: float
    ) -> list[Instruction]:
        """What the coordinator makes of what a worker says."""
        match message:
            case Started(alike=alike, step=step, virtual_workers=number):
                return coordinator.started(alike, step, number or self._tally.virtual_workers, now)
            case Steps(steps=steps):
                return coordinator.stepped(steps, now)
            case Leaving():
                assert self._attempt is not None
                self._attempt.watch.leaving(member, now + self._attempt.request.grace_s)
                return coordinator.leaves(member, now)
            case Ready(alike=alike):
                return coordinator.ready(member, alike, now)
            case Prepared(generation=generation):
                return coordinator.prepared(member, generation)
            case Switched(generation=generation, step=step, paused=paused, why_all=why_all):
                return coordinator.switched(member, generation, step, paused, now, why_all)
            case Recovered(generation=generation, placement=placement, again=again, paused=paused):
                return coordinator.recovered(member, generation, placement, again, paused, now)
            case Lost(generation=generation):
                coordinator.lost_by(generation, now)
        return []

    def _carry_out(self, instructions: Sequence[_ToDo]) -> None:
        """Answers are part of the record, and the record is kept before anything is done."""
        for instruction in instructions:
            if isinstance(instruction, _Reply):
                self._reception.note(instruction.request, instruction.answer)
            elif isinstance(instruction, Profiled):
                self._reception.note(instruction.wish.request, ProfileTable(instruction.rows))
            elif isinstance(instruction, Done | Refused):
                self._reception.note(instruction.change.request, self._answer(instruction))
        self._to_do += instructions
        self._work_off()

    def _work_off(self) -> None:
        """If the record cannot be kept now, what is to be done waits, and is tried again; workers train on."""
        if self._to_do and self._hands.keep(self.record):
            to_do, self._to_do = self._to_do, []
            for instruction in to_do:
                self._do(instruction)

    def _do(self, instruction: _ToDo) -> None:
        attempt, now = self._attempt, time.monotonic()
        match instruction:
            case Order() as order:
                self._obey([order])
            case _Tell(asker=asker, reply=reply):
                asker.answer(reply)
            case _Reply(request=request, answer=answer):
                self._reception.answer(request, answer)
            case Done() as done:
                if attempt is not None:
                    attempt.watch.joined(done.joined)
                if done.joined or done.before != done.after or done.change.counts is not None:
                    self._tally.resized(done, now)
                    self._observer.resized(done)
                self._reception.answer(done.change.request, self._answer(done))
            case Refused(change=change, reason=reason) as refused:
                if not reason.endswith("retry"):
                    self._tally.refused(change, reason, now)
                    self._observer.refused(change, reason)
                self._reception.answer(change.request, self._answer(refused))
            case Profiled(wish=wish, rows=rows):
                self._reception.answer(wish.request, ProfileTable(rows))
            case Rescued() as rescued:
                told = attempt.watch.told_of(rescued.lost) if attempt is not None else ()
                self._tally.recovered(rescued, str(self._request.recovery), told, now)
                self._observer.recovered(rescued)
            case Noticed(straggler=straggler):
                self._tally.noticed(straggler, now)
                self._observer.noticed(straggler)
            case GiveUp(reason=reason) if attempt is not None:
                attempt.watch.gave_up(reason, now)
            case Start(member=member) | _Launch(member=member) if attempt is not None:
                if attempt.request.seating is not None:
                    attempt.request.seating.sit(member, attempt.coordinator.members)
                assignment = attempt.request.assignment(
                    member,
                    attempt.coordinator.store(FIRST_GENERATION),
                    joins=isinstance(instruction, Start),
                    traces=self._hands.traces(attempt.number),
                )
                self._hands.start(Seat(attempt.number, member), assignment)
            case Tell(member=member, message=message) if attempt is not None:
                self._hands.tell(Seat(attempt.number, member), message)
            case End(member=member) if attempt is not None:
                self._hands.signal(Seat(attempt.number, member), signal.SIGKILL)

    def _answer(self, result: Done | Refused) -> Answer:
        if isinstance(result, Refused):
            workers = len(self._attempt.coordinator.members) if self._attempt is not None else 0
            return Answer(False, result.reason, self._tally.step, workers)
        text = f"{result.after} workers since step {result.step}"
        return Answer(True, text, result.step, result.after, result.paused * 1e3, result.prepared * 1e3)

    def _obey(self, orders: list[Order]) -> None:
        assert self._attempt is not None
        for order in orders:
            for member in order.workers:
                seat = Seat(self._attempt.number, member)
                if order.signal == signal.SIGTERM and not self._request.reference:
                    # The signal itself would ask this one alone to leave.
                    self._hands.tell(seat, Terminate(final=self._attempt.watch.ends))
                else:
                    self._hands.signal(seat, order.signal)

    def _status(self) -> Status:
        tally = self._tally
        coordinator = self._attempt.coordinator if self._attempt is not None else None
        phase = "suspended" if self.has_begun else "waiting for nodes"
        if self._next is not None:
            phase = "starting again"
        if coordinator is not None:
            phase = str(coordinator.phase) if coordinator.training else "starting"
        members = coordinator.members if coordinator is not None else ()
        return Status(
            name=self._request.name or "",
            program=self._request.program.name,
            pid=os.getpid(),
            virtual_workers=tally.virtual_workers,
            workers=len(members),
            members=members,
            generation=coordinator.generation if coordinator is not None else 0,
            phase="suspending" if self._suspending is not None else phase,
            step=self._step,
            loss=tally.steps[-1].loss if tally.steps else None,
            throughput=tally.rate() if coordinator is not None else None,
            devices=self._request.seating.devices(members) if self._request.seating is not None else (),
        )


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name}"

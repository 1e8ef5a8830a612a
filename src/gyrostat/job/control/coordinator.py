"""Which processes a job consists of, and how that changes while it trains: decided purely, carried out by `launcher`.

Facts go in (somebody asks for another number of workers, a worker reports, a process has gone), instructions come out, with
their reasons. A change goes through these phases, and only the last one touches training:

    STARTING    newcomers start, import, build their model; each says Ready, with what must be equal on all workers
    CONNECTING  all members, old and new, connect to those of the next generation; each says Prepared
    FENCED      all know the fence; it holds at the first boundary that all workers acknowledge, or at the scheduled one
    STEADY      the generation has begun; leavers have gone

A newcomer that dies or does not fit before the fence holds changes nothing: the generation is cancelled. One change at a time:
another request meanwhile is answered "busy" at once. What a schedule asks for is tried again, for workers wait for it. A worker
that is sent SIGTERM leaves by a change of its own, before anything else that is not yet under way. A profile (`profiling`)
is a row of changes, between which nobody else's are made.

A member that dies is no change but a fact: those that are left are told at once to go on by themselves (RECOVERING), and
whatever was being prepared begins anew after that. Then another process takes the place of the lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from gyrostat.core.job import NextGeneration
from gyrostat.core.phase import RECONFIGURATION_TRANSITIONS, ReconfigurationPhase, transition
from gyrostat.core.placement import Placement
from gyrostat.job.control.profiling import ProfileRequest, Profiling, SizeMeasured
from gyrostat.job.diagnostics.stragglers import Pace, Reaction, Straggler, shares
from gyrostat.job.processes.protocol import BeginRecovery, Cancel, Prepare, SetFence, StepReport, Terminate

_TRIES = 3
_HEAR_OF_DEATH_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Reconfiguration:
    """A wish: so many workers."""

    workers: int
    reason: str
    at_step: int | None = None
    """At this boundary and no other, where all workers wait for it; None: as soon as it can be."""
    request: str | None = None
    """Whoever asked knows it by this name."""
    without: tuple[int, ...] = ()
    """These members leave, whoever else does; others come in their place if the number asks for it."""
    counts: tuple[int, ...] | None = None
    """How many virtual workers each worker runs; None: as even as can be."""


# Instructions.


@dataclass(frozen=True)
class StartNewcomer:
    """Start a process that joins."""

    member: int


@dataclass(frozen=True)
class TellMember:
    member: int
    message: msgspec.Struct


@dataclass(frozen=True)
class EndNewcomer:
    """End a newcomer that will not join."""

    member: int
    reason: str


@dataclass(frozen=True)
class ReconfigurationDone:
    """The change is in force, since boundary `step`."""

    change: Reconfiguration
    step: int
    before: int
    after: int
    paused: float
    """Seconds for which training stood still."""
    prepared: float
    """Seconds from the wish to the boundary."""
    joined: tuple[int, ...]
    why_all: str | None = None
    """Why newcomers had to be told all state at the fence."""


@dataclass(frozen=True)
class ReconfigurationRefused:
    """The change will not be; nothing has happened."""

    change: Reconfiguration
    reason: str
    retryable: bool = False
    """Refused for now only: the same request may succeed later."""


@dataclass(frozen=True)
class SurvivorsGoOn:
    """Those that are left go on without these members."""

    lost: tuple[int, ...]
    reason: str
    step: int
    before: int
    after: int
    redone: int
    """Micro-batches that the lost ones had run in the pass that was running."""
    paused: float
    """Seconds for which whoever waited longest stood still."""
    waits: bool = False
    """They are too few, and wait for others at the next boundary."""


@dataclass(frozen=True)
class ProfileDone:
    """What the profile says; the job is back on the size that it had."""

    wish: ProfileRequest
    rows: tuple[SizeMeasured, ...]


@dataclass(frozen=True)
class StragglerNoticed:
    """A worker has become slower than the others."""

    straggler: Straggler


@dataclass(frozen=True)
class GiveUp:
    """Workers wait for a change that cannot be made: the job cannot go on."""

    reason: str


Instruction = (
    StartNewcomer
    | TellMember
    | EndNewcomer
    | ReconfigurationDone
    | ReconfigurationRefused
    | SurvivorsGoOn
    | ProfileDone
    | StragglerNoticed
    | GiveUp
)


class CoordinatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that a coordinator knows and cannot learn again from the workers."""

    virtual_workers: int
    members: tuple[int, ...]
    schedule: list[Reconfiguration]
    generation: int
    phase: ReconfigurationPhase
    training: bool
    step: int
    alike: dict[str, str]
    change: Reconfiguration | None
    next_member: int
    newcomers: tuple[int, ...]
    plan: NextGeneration | None
    placement: Placement | None
    leaving: tuple[int, ...]
    profile: ProfileRequest | None
    home: int | None
    """The size to which the job goes back after a profile."""
    lost: tuple[int, ...] = ()
    why_lost: str = ""
    missed: int = 0


@dataclass
class Coordinator:
    """One job's processes."""

    virtual_workers: int
    members: tuple[int, ...]
    """Worker 0, 1, 2 … of the generation in force."""
    store: Callable[[int], str]
    """The rendezvous file of a generation."""
    schedule: list[Reconfiguration] = field(default_factory=list)
    """What is still to come, in order."""
    placement: Placement | None = None
    """In force; None: as even as can be."""
    pace: Pace = field(default_factory=Pace)
    """Who is how fast."""
    recovers: bool = False
    """Workers can go on without one that dies."""
    min_workers: int = 1
    """With fewer workers than that they wait for others."""
    generation: int = 1
    phase: ReconfigurationPhase = ReconfigurationPhase.STEADY
    training: bool = False
    step: int = 0
    _alike: dict[str, str] = field(default_factory=dict)
    _change: Reconfiguration | None = None
    _since: float = 0.0
    _tries: int = 0
    _next_member: int = 0
    _newcomers: tuple[int, ...] = ()
    _waiting_for: set[int] = field(default_factory=set)
    _plan: NextGeneration | None = None
    _begun: ReconfigurationDone | None = None
    _leaving: tuple[int, ...] = ()
    _profiling: Profiling | None = None
    _began_at: int = 0
    _reacted: float = float("-inf")
    _removed: int = 0
    """Stragglers, so far."""
    _comes_back_at: float = float("inf")
    _lost: tuple[int, ...] = ()
    _why_lost: str = ""
    _missed: int = 0
    """How many of them nobody had asked to leave."""
    _redone: int = 0
    _paused: float = 0.0
    _look_at: float | None = None
    _left: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._next_member = max(self.members) + 1

    # Facts.

    def started(
        self, alike: dict[str, str], step: int, virtual_workers: int, now: float
    ) -> list[Instruction]:
        """Training begins, at `step`: from the beginning, or from a checkpoint."""
        if self.training:
            return []  # the leader before this one has heard it, too
        self.training, self.step, self._alike = True, step, alike
        if self.placement is None or self.placement.virtual_workers != virtual_workers:
            self.placement = Placement.even(virtual_workers, len(self.members))
        self.virtual_workers = virtual_workers
        while len(self.schedule) > 1 and (self.schedule[1].at_step or 0) < step:
            self.schedule.pop(0)
        if self.schedule and (self.schedule[0].at_step or 0) < step:
            late = self.schedule.pop(0)  # of what lies before the checkpoint, the last one is in force
            self.schedule.insert(0, Reconfiguration(workers=late.workers, reason=late.reason))
        return self._go_on(now)

    def asked(self, change: Reconfiguration, now: float) -> list[Instruction]:
        """Somebody wants another number of workers."""
        if (busy := self.busy()) is not None:
            return [ReconfigurationRefused(change, busy, retryable=True)]
        if not 1 <= change.workers <= self.virtual_workers:
            return [
                ReconfigurationRefused(
                    change,
                    f"{change.workers} workers cannot share {self.virtual_workers} virtual workers; "
                    f"ask for 1 to {self.virtual_workers}",
                )
            ]
        if unknown := [member for member in change.without if member not in self.members]:
            return [
                ReconfigurationRefused(change, f"no such worker: {unknown}; there are {list(self.members)}")
            ]
        if change.workers == len(self.members) and not change.without:
            return [ReconfigurationDone(change, self.step, change.workers, change.workers, 0.0, 0.0, ())]
        return self._begin(change, now)

    def asked_to_profile(self, wish: ProfileRequest, now: float) -> list[Instruction]:
        """Somebody wants to know how fast the job is on each number of workers."""
        if (busy := self.busy()) is not None:
            return [self._no_profile(wish, busy, retryable=True)]
        profiling = Profiling.of(wish, len(self.members))
        if not profiling.sizes or not 1 <= profiling.sizes[-1] <= profiling.sizes[0] <= self.virtual_workers:
            smallest, largest = wish.ends(len(self.members))
            reason = (
                f"there is no size from {smallest} to {largest} to measure; sizes are 1 to {self.virtual_workers}, the "
                "number of virtual workers"
            )
            return [self._no_profile(wish, reason)]
        if wish.steps < 1:
            return [
                self._no_profile(wish, f"a size is measured over at least one step, not over {wish.steps}")
            ]
        self._profiling = profiling
        return self._measure(profiling, now)

    def stepped(self, steps: Sequence[StepReport], now: float) -> list[Instruction]:
        """Steps are complete."""
        self.step = max(self.step, steps[-1].step)
        noticed: list[Instruction] = [
            StragglerNoticed(straggler) for straggler in self.pace.add(self._times(steps))
        ]
        if self.phase is not ReconfigurationPhase.STEADY:
            return noticed
        if self._profiling is None:
            return [*noticed, *self._react(now)]
        return [*noticed, *(self._measure(self._profiling, now) if self._profiling.add(steps) else ())]

    def leaves(self, member: int, now: float) -> list[Instruction]:
        """A worker was asked to leave, by a signal that it got."""
        if member in self._newcomers and self._begun is None:
            reason = "was asked to leave"
            return [EndNewcomer(member, reason), *self.gone(member, reason, now)]
        if member not in (*self.members, *self._newcomers) or member in self._leaving:
            return []
        if not self.training:
            return [TellMember(member, Terminate())]
        self._leaving = (*self._leaving, member)
        return [*self._abandon_profile(f"worker {member} leaves the job"), *self._go_on(now)]

    def ready(self, member: int, alike: dict[str, str], now: float) -> list[Instruction]:
        """A newcomer has built everything."""
        if member not in self._waiting_for or self.phase is not ReconfigurationPhase.STARTING_WORKERS:
            return []
        for name in sorted(self._alike.keys() | alike.keys()):
            if self._alike.get(name) != alike.get(name):
                reason = (
                    f"the new worker {member} does not fit: its {name} is {alike.get(name)!r}, the job's "
                    f"{self._alike.get(name)!r}"
                )
                return self._fail(reason, now, final=True)
        self._waiting_for.discard(member)
        return [] if self._waiting_for else self._connect()

    def prepared(self, member: int, generation: int) -> list[Instruction]:
        """A worker is connected to the generation to come."""
        if (
            self._plan is None
            or generation != self._plan.generation
            or self.phase is not ReconfigurationPhase.CONNECTING
        ):
            return []
        self._waiting_for.discard(member)
        if self._waiting_for:
            return []
        self._enter(ReconfigurationPhase.FENCED)
        return self._set_fence()

    def _set_fence(self) -> list[Instruction]:
        self._waiting_for = set(self._newcomers)
        return [TellMember(member, self._fence()) for member in self.members]

    def _fence(self) -> SetFence:
        assert self._change is not None
        assert self._plan is not None
        return SetFence(self._plan.generation, self._change.at_step or 0)

    def switched(
        self, member: int, generation: int, step: int, paused: float, now: float, why_all: str | None = None
    ) -> list[Instruction]:
        """A generation has begun on a worker. It is in force when all newcomers say so; without any, when somebody does."""
        if self._plan is None or generation != self._plan.generation:
            return []
        assert self._change is not None
        before = self._begun
        self._begun = ReconfigurationDone(
            self._change,
            step,
            len(self.members),
            len(self._plan.members),
            max(paused, before.paused if before else 0.0),
            now - self._since,
            self._plan.newcomers,
            why_all or (before.why_all if before else None),
        )
        self._waiting_for.discard(member)
        return [] if self._waiting_for else [*self._in_force(), *self._go_on(now)]

    def _in_force(self) -> list[Instruction]:
        """The generation that has begun is the job's."""
        if self._begun is None:
            return []
        assert self._plan is not None
        done, self.members, self.generation = self._begun, self._plan.members, self._plan.generation
        self._leaving = tuple(member for member in self._leaving if member in self.members)
        self.step = max(self.step, done.step)
        self.placement, self._began_at = self._plan.placement, done.step
        self._settle()
        return [done]

    def gone(self, member: int, reason: str, now: float) -> list[Instruction]:
        """A newcomer has ended before it joined."""
        if member not in self._newcomers:
            return []
        if self._begun is not None:
            return self._in_force()  # it was a member already, for some: the job has lost a worker
        self._newcomers = tuple(other for other in self._newcomers if other != member)
        return self._fail(f"the new worker {member} {reason} before it joined", now)

    # When a member is lost.

    def died(self, lost: Sequence[int], reason: str, now: float) -> list[Instruction] | None:
        """Members have gone in the middle of training. None: there is nobody who could go on without them."""
        if not self.training or not self.recovers:
            return None
        if lost and not set(lost) & {*self.members, *self._newcomers}:
            return []  # nobody waits for it any more
        instructions: list[Instruction] = []
        absent: set[int] = {*lost, *self._left}
        if self._begun is not None:  # in force for some, so for all; but who has not arrived never will
            absent |= self._waiting_for
            arriving = tuple(member for member in self._waiting_for if member not in lost)
            instructions += [*self._in_force(), *(EndNewcomer(member, reason) for member in arriving)]
        survivors = tuple(member for member in self.members if member not in absent)
        self._look_at = None
        if not survivors:
            return None
        if self.phase not in (ReconfigurationPhase.STEADY, ReconfigurationPhase.RECOVERING):
            instructions += self._break_off(reason)
        number = max(self.generation, self._plan.generation if self._plan is not None else 0) + 1
        gone = tuple(member for member in self.members if member not in survivors)
        self._lost = (*self._lost, *gone)
        self._missed += sum(member not in self._leaving for member in gone)
        self._why_lost = self._why_lost or reason
        self.members, self._leaving = survivors, tuple(m for m in self._leaving if m in survivors)
        self._enter(ReconfigurationPhase.RECOVERING)
        self._waiting_for = set(survivors)
        self._plan = NextGeneration(
            generation=number,
            placement=Placement.even(self.virtual_workers, len(survivors)),
            members=survivors,
            newcomers=(),
            donor=survivors[0],
            store=self.store(number),
            is_rescue=True,
            waits=len(survivors) < self.min_workers,
        )
        return [*instructions, *(TellMember(member, BeginRecovery(self._plan)) for member in survivors)]

    def left(self, member: int, now: float) -> list[Instruction]:
        """A worker has left in good order, at a fence. If those that are left have been told to wait for it, they need not."""
        self._left.add(member)
        if self.phase is not ReconfigurationPhase.RECOVERING or member not in self.members:
            return []
        self._leaving = (*self._leaving, member)
        return self.died((member,), self._why_lost, now) or []

    def lost_by(self, generation: int, now: float) -> None:
        """A worker has lost another one. Mostly we hear at once which; if not, all try to find each other again."""
        current = self._plan if self.phase is ReconfigurationPhase.RECOVERING else None
        newest = self.generation if current is None else current.generation
        if self.training and self.recovers and generation >= newest and self._look_at is None:
            self._look_at = now + _HEAR_OF_DEATH_S

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        if self._look_at is None or now < self._look_at:
            return []
        return self.died((), "connections among workers broke", now) or []

    def deadline(self) -> float | None:
        return self._look_at

    def _break_off(self, reason: str) -> list[Instruction]:
        """A change is under way that cannot go on as it is: its newcomers end, and it begins anew later."""
        assert self._change is not None
        change, newcomers = self._change, self._newcomers
        if change.request is not None or change.at_step is not None:
            self.schedule.insert(0, change)
        elif change.workers > len(self.members):  # who was lost before has not been replaced yet
            self._missed += change.workers - len(self.members)
        number = self.generation if self._plan is None else self._plan.generation
        self._settle()
        self.generation = number
        return [EndNewcomer(member, reason) for member in newcomers]

    def recovered(
        self, member: int, generation: int, placement: Placement, again: int, paused: float, now: float
    ) -> list[Instruction]:
        """A survivor has found the others."""
        plan = self._plan
        if self.phase is not ReconfigurationPhase.RECOVERING or plan is None or generation != plan.generation:
            return []
        if member not in self._waiting_for:
            return []
        self._waiting_for.discard(member)
        self._redone, self._paused = self._redone + again, max(self._paused, paused)
        if self._waiting_for:
            return []
        before = len(self.members) + len(self._lost)
        rescued = SurvivorsGoOn(
            self._lost,
            self._why_lost,
            self.step,
            before,
            len(self.members),
            self._redone,
            self._paused,
            plan.waits,
        )
        self.generation, self.placement, self._began_at = plan.generation, placement, self.step + 1
        if self._missed and self._profiling is None and not self._is_awaited():
            who = ", ".join(map(str, self._lost))
            reason = f"in place of worker{'s' * (len(self._lost) > 1)} {who}"
            self.schedule.insert(0, Reconfiguration(workers=len(self.members) + self._missed, reason=reason))
        self._lost, self._why_lost, self._missed, self._redone, self._paused = (), "", 0, 0, 0.0
        self._settle()
        return [rescued, *self._go_on(now)]

    def _is_awaited(self) -> bool:
        """Somebody waits for the change that comes next: whoever asked for it, or workers at its step."""
        if not self.schedule:
            return False
        change = self.schedule[0]
        return change.request is not None or (change.at_step is not None and change.at_step <= self.step + 1)

    def over(self) -> list[Instruction]:
        """The job has ended: who was about to join is not needed."""
        self.schedule, self.training = [], False
        if self._begun is not None:
            return [*self._in_force(), *self._abandon_profile("the job ended")]
        ended: list[Instruction] = [
            EndNewcomer(member, "the job ended before it could join") for member in self._newcomers
        ]
        if self._change is not None:
            ended.append(
                ReconfigurationRefused(self._change, "the job ended before the change could be made")
            )
        self._settle()
        return [*ended, *self._abandon_profile("the job ended")]

    def busy(self) -> str | None:
        """Why no change can be begun now."""
        if not self.training:
            return "the job has not begun to train yet; retry"
        if self._profiling is not None:
            return "busy with a profile; retry"
        if self.phase is ReconfigurationPhase.RECOVERING:
            return "busy: a worker was lost, and the others are about to go on; retry"
        if self.phase is not ReconfigurationPhase.STEADY:
            return f"busy with another change ({self._change_words()}); retry"
        return None

    # Another leader.

    def record(self) -> CoordinatorRecord:
        """To be kept before the instructions that came with it are carried out."""
        return CoordinatorRecord(
            virtual_workers=self.virtual_workers,
            members=self.members,
            schedule=list(self.schedule),
            generation=self.generation,
            phase=self.phase,
            training=self.training,
            step=self.step,
            alike=self._alike,
            change=self._change,
            next_member=self._next_member,
            newcomers=self._newcomers,
            plan=self._plan,
            placement=self.placement,
            leaving=self._leaving,
            profile=self._profiling.wish if self._profiling is not None else None,
            home=self._profiling.home if self._profiling is not None else None,
            lost=self._lost,
            why_lost=self._why_lost,
            missed=self._missed,
        )

    @classmethod
    def restore(cls, record: CoordinatorRecord, store: Callable[[int], str]) -> Coordinator:
        """As it was when the record was kept. Then comes `took_over`."""
        restored = cls(
            record.virtual_workers,
            record.members,
            store,
            list(record.schedule),
            placement=record.placement,
            generation=record.generation,
            phase=record.phase,
            training=record.training,
            step=record.step,
        )
        if record.profile is not None and record.home is not None:
            restored._profiling = Profiling(record.profile, record.home, [])
        restored._leaving = record.leaving
        restored._alike, restored._change = dict(record.alike), record.change
        restored._next_member, restored._newcomers = record.next_member, record.newcomers
        restored._plan = record.plan
        restored._lost, restored._why_lost, restored._missed = record.lost, record.why_lost, record.missed
        return restored

    def took_over(self, now: float) -> list[Instruction]:
        """Another leader has left this one its record.

        A fence may hold already, so it stays set, and is told again to those who may not have heard of it. Before that nobody
        has begun anything: the change is called off, and whoever wants it asks again, as the schedule does.
        """
        self._since, reason = now, "the job's leader has changed meanwhile; retry"
        broken_off: list[Instruction] = []
        if self._profiling is not None:
            wish, home, self._profiling = self._profiling.wish, self._profiling.home, None
            broken_off.append(self._no_profile(wish, reason, retryable=True))
            self.schedule.insert(
                0, Reconfiguration(workers=home, reason="back from a profile that was broken off")
            )
        if self.phase is ReconfigurationPhase.STEADY:
            return [*broken_off, *self._go_on(now)]
        if self.phase is ReconfigurationPhase.FENCED:
            return [*broken_off, *self._set_fence()]
        if (
            self.phase is ReconfigurationPhase.RECOVERING
        ):  # the leader before may have taken their meeting place with it
            return [*broken_off, *(self.died((), self._why_lost, now) or ())]
        return [*broken_off, *self._fail(reason, now, retryable=True)]

    def retell(self, member: int) -> list[Instruction]:
        """What this one may have missed while its agent was away."""
        if self._plan is None:
            return []
        if self.phase is ReconfigurationPhase.CONNECTING and member in self._waiting_for:
            return [TellMember(member, Prepare(self._plan))]
        if self.phase is ReconfigurationPhase.FENCED and member in self.members:
            return [TellMember(member, self._fence())]
        if self.phase is ReconfigurationPhase.RECOVERING and member in self._waiting_for:
            return [TellMember(member, BeginRecovery(self._plan))]
        return []

    @property
    def wants(self) -> int:
        """So many workers the job should have: those that it has, and others in place of those that it has lost."""
        to_come = [] if self._profiling is not None else [self._change, *self.schedule[:1]]
        replacing = [
            change.workers
            for change in to_come
            if change is not None
            and change.request is None
            and change.at_step is None
            and not change.without
            and change.counts is None
        ]
        return max([len(self.members) + self._missed, *replacing])

    def request(self) -> str | None:
        """Whose wish is being carried out."""
        return self._change.request if self._change is not None else None

    @property
    def leaving(self) -> tuple[int, ...]:
        """Those that have been sent SIGTERM."""
        return self._leaving

    @property
    def expected(self) -> tuple[int, ...]:
        """Those for whom others wait, or soon may."""
        connects = self.phase in (ReconfigurationPhase.CONNECTING, ReconfigurationPhase.FENCED)
        return (*self.members, *(self._newcomers if connects else ()))

    def is_newcomer(self, member: int) -> bool:
        """Started, but not yet a member."""
        return member in self._newcomers

    # Phases.

    def _go_on(self, now: float) -> list[Instruction]:
        """What is to be done next, if nothing is under way: let go who leaves; then the profile; then the schedule."""
        if self.phase is not ReconfigurationPhase.STEADY or not self.training:
            return []
        if self._leaving:
            return self._let_go(now)
        if self._profiling is not None:
            return self._measure(self._profiling, now)
        # What the schedule wants next is prepared at once, however far away it is.
        while self.schedule:
            change = self.schedule.pop(0)
            change = replace(
                change, without=tuple(member for member in change.without if member in self.members)
            )
            # Workers wait at its step, even if there are as many as it wants.
            if change.workers != len(self.members) or change.at_step is not None or change.without:
                return self._begin(change, now)
            if change.request is not None:  # a death has done it
                size = len(self.members)
                return [ReconfigurationDone(change, self.step, size, size, 0.0, 0.0, ()), *self._go_on(now)]
        return []

    def _let_go(self, now: float) -> list[Instruction]:
        staying = [member for member in self.members if member not in self._leaving]
        if not staying:
            return [TellMember(self.members[0], Terminate())]
        who = ", ".join(map(str, self._leaving))
        reason = f"worker{'s' * (len(self._leaving) > 1)} {who} asked to leave by SIGTERM"
        return self._begin(Reconfiguration(workers=len(staying), reason=reason, without=self._leaving), now)

    def _measure(self, profiling: Profiling, now: float) -> list[Instruction]:
        if profiling.wants != len(self.members):
            return self._begin(Reconfiguration(workers=profiling.wants, reason="profile"), now)
        if profiling.sizes:
            profiling.begin(self.step)
            return []
        self._profiling = None
        return [ProfileDone(profiling.wish, profiling.table()), *self._go_on(now)]

    def _times(self, steps: Sequence[StepReport]) -> list[dict[int, float]]:
        """Each member's seconds per virtual worker, of steps in the generation that is in force."""
        assert self.placement is not None
        counts = [len(self.placement.held_by(worker)) for worker in range(len(self.members))]
        return [
            {
                member: seconds / count
                for member, seconds, count in zip(self.members, step.busy, counts, strict=True)
            }
            for step in steps
            if step.step > self._began_at and len(step.busy) == len(counts)
        ]

    def _react(self, now: float) -> list[Instruction]:
        """Let go of a straggler, let one come back, or share virtual workers out by speed; not too often."""
        policy, recent = self.pace.policy, self.pace.recent()
        if now - self._reacted < policy.pause_s or set(recent) != set(self.members):
            return []
        change: Reconfiguration | None = None
        if policy.reaction is Reaction.REMOVE and (slow := self.pace.stragglers()):
            worst = max(slow, key=lambda straggler: straggler.seconds)
            change = Reconfiguration(
                workers=len(self.members) - 1, reason=str(worst), without=(worst.member,)
            )
            self._comes_back_at = policy.comes_back_at(now, self._removed)
            self._removed += 1
        elif policy.reaction is Reaction.REMOVE and now >= self._comes_back_at:
            self._comes_back_at = float("inf")
            reason = "the place of a worker that was removed for being slow is tried again"
            change = Reconfiguration(workers=len(self.members) + 1, reason=reason)
        elif policy.reaction is Reaction.REPLACE:
            assert self.placement is not None
            counts = [len(self.placement.held_by(worker)) for worker in range(len(self.members))]
            seconds = [recent[member] for member in self.members]
            if wanted := shares(self.virtual_workers, counts, seconds, policy.gain):
                speeds = ", ".join(f"{1e3 * time:.1f}" for time in seconds)
                reason = f"workers take {speeds} ms for a virtual worker: {wanted} instead of {counts} of them each"
                change = Reconfiguration(workers=len(self.members), reason=reason, counts=tuple(wanted))
        if change is None:
            return []
        self._reacted = now
        return self._begin(change, now)

    def _abandon_profile(self, reason: str) -> list[Instruction]:
        profiling, self._profiling = self._profiling, None
        if profiling is None:
            return []
        where = f"the job runs on {len(self.members)} workers and had {profiling.home}"
        return [self._no_profile(profiling.wish, f"the profile was broken off: {reason}; {where}")]

    def _no_profile(
        self, wish: ProfileRequest, reason: str, *, retryable: bool = False
    ) -> ReconfigurationRefused:
        change = Reconfiguration(workers=len(self.members), reason="profile", request=wish.request)
        return ReconfigurationRefused(change, reason, retryable)

    def _begin(self, change: Reconfiguration, now: float, *, again: bool = False) -> list[Instruction]:
        self._change = change
        if not again:
            self._since, self._tries = now, 0
        self._tries += 1
        more = change.workers - len(self._staying(change))
        self._newcomers = tuple(range(self._next_member, self._next_member + more))
        self._next_member += more
        if not self._newcomers:
            return self._connect()
        self._enter(ReconfigurationPhase.STARTING_WORKERS)
        self._waiting_for = set(self._newcomers)
        return [StartNewcomer(member) for member in self._newcomers]

    def _staying(self, change: Reconfiguration) -> tuple[int, ...]:
        """The first ones stay, so that worker 0 rarely changes."""
        return tuple(member for member in self.members if member not in change.without)[: change.workers]

    def _connect(self) -> list[Instruction]:
        assert self._change is not None
        stay = self._staying(self._change)
        self._plan = NextGeneration(
            generation=self.generation + 1,
            placement=Placement.even(self.virtual_workers, self._change.workers)
            if self._change.counts is None
            else Placement.from_counts(self._change.counts),
            members=(*stay, *self._newcomers),
            newcomers=self._newcomers,
            donor=stay[-1] if stay else self.members[0],
            store=self.store(self.generation + 1),
        )
        self._enter(ReconfigurationPhase.CONNECTING)
        everyone = (*self.members, *self._newcomers)
        self._waiting_for = set(everyone)
        return [TellMember(member, Prepare(self._plan)) for member in everyone]

    def _fail(
        self, reason: str, now: float, *, final: bool = False, retryable: bool = False
    ) -> list[Instruction]:
        """Nothing has happened; a scheduled change is tried again."""
        change = self._change
        assert change is not None
        instructions: list[Instruction] = [EndNewcomer(member, reason) for member in self._newcomers]
        if self._plan is not None:
            instructions += [TellMember(member, Cancel(self._plan.generation)) for member in self.members]
            self.generation = (
                self._plan.generation
            )  # its number is used up: no message of it may be taken for another's
        self._settle()
        if self._profiling is not None:
            return [*instructions, *self._abandon_profile(reason), *self._go_on(now)]
        awaited = change.at_step is not None or (
            change.request is None and len(self.members) < self.min_workers
        )
        if not awaited:
            return [*instructions, ReconfigurationRefused(change, reason, retryable), *self._go_on(now)]
        if final or self._tries >= _TRIES:
            return [
                *instructions,
                GiveUp(f"{reason}; workers wait until there are {change.workers} ({change.reason})"),
            ]
        return [*instructions, *self._begin(change, now, again=True)]

    def _enter(self, phase: ReconfigurationPhase) -> None:
        """The only place that changes the phase."""
        self.phase = transition(self.phase, phase, RECONFIGURATION_TRANSITIONS)

    def _settle(self) -> None:
        self._enter(ReconfigurationPhase.STEADY)
        self._change, self._plan, self._begun = None, None, None
        self._newcomers, self._waiting_for = (), set()

    def _change_words(self) -> str:
        assert self._change is not None
        return f"to {self._change.workers} workers, {self.phase}"


def changes(first: int, entries: Sequence[tuple[int, int]]) -> list[Reconfiguration]:
    """A schedule as wishes: only where the number of workers really changes."""
    wanted, workers = [], first
    for step, count in entries:
        if count != workers:
            wanted.append(
                Reconfiguration(
                    workers=count, at_step=step, reason=f"scheduled: {count} workers from step {step} on"
                )
            )
            workers = count
    return wanted

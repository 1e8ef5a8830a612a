"""Which workers a job consists of, and how that changes while it trains: decided purely, carried out by `leader`.

Facts go in (a request, a worker's report, a worker's death), instructions come out, with their reasons (`instructions`). The
parts: `generations` (the generation in force and the change to the next one, with its phases), `recovery` (lost workers),
`straggler_response`, `profiling`. The coordinator decides which change is made next:

1. a recovery, at once: whatever was being prepared is cancelled, and begins again afterwards
2. workers that were sent SIGTERM leave
3. a profile that is under way; no other change is made until it is complete
4. the schedule: changes at given steps, and the replacement of lost workers

One change at a time: a request meanwhile is refused as retryable. A new worker that dies or does not fit before the fence holds
changes nothing: the generation is cancelled. A change that workers wait for is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gyrostat.core.phase import ReconfigurationPhase
from gyrostat.core.placement import Placement
from gyrostat.core.plural import numbered, plural
from gyrostat.job.control.coordinator_record import CoordinatorOptions, CoordinatorRecord
from gyrostat.job.control.generations import Generations
from gyrostat.job.control.instructions import (
    EndNewcomer,
    GiveUp,
    Instruction,
    ProfileDone,
    Reconfiguration,
    ReconfigurationDone,
    ReconfigurationRefused,
    TellMember,
    refused_profile,
)
from gyrostat.job.control.profiling import ProfileRequest, Profiling, SpeedBySize
from gyrostat.job.control.recovery import RecoveryState
from gyrostat.job.control.schedule import Schedule
from gyrostat.job.control.straggler_response import StragglerResponse
from gyrostat.job.processes.protocol import StepReport, Terminate

_TRIES = 3
_Phase = ReconfigurationPhase


class Coordinator:
    """The workers of one job."""

    def __init__(
        self,
        generations: Generations,
        schedule: Sequence[Reconfiguration] = (),
        options: CoordinatorOptions | None = None,
        *,
        training: bool = False,
    ) -> None:
        self.generations = generations
        self.training = training
        self.leaving: tuple[int, ...] = ()
        """Members that were sent SIGTERM."""
        self._schedule = Schedule(list(schedule))
        self._options = options or CoordinatorOptions()
        self._compatibility: dict[str, str] = {}
        """What must be equal on all workers."""
        self._tried: tuple[Reconfiguration | None, int] = (None, 0)
        self._profiling: Profiling | None = None
        self._speeds = SpeedBySize()
        self._stragglers = StragglerResponse(self._options.pace)
        self._recovery = RecoveryState()

    @property
    def members(self) -> tuple[int, ...]:
        return self.generations.members

    @property
    def profiling(self) -> bool:
        return self._profiling is not None

    @property
    def _limits(self) -> tuple[int, int | None]:
        """Virtual workers, and devices if a scheduler assigns them."""
        return self.generations.virtual_workers, self._options.devices and self._options.devices()

    # Training.

    def started(
        self, compatibility: dict[str, str], step: int, virtual_workers: int, now: float
    ) -> list[Instruction]:
        """Training begins at `step`: at the beginning, or at a checkpoint."""
        if self.training:
            return []  # the previous leader has received it, too
        generations = self.generations
        self.training, generations.step, self._compatibility = True, step, compatibility
        if generations.placement is None or generations.placement.virtual_workers != virtual_workers:
            generations.placement = Placement.even(virtual_workers, len(self.members))
        generations.virtual_workers = virtual_workers
        self._schedule.skip_to(step)
        return self._next(now)

    def stepped(self, steps: Sequence[StepReport], now: float) -> list[Instruction]:
        """Steps are complete."""
        generations = self.generations
        generations.step = max(generations.step, steps[-1].step)
        noticed: list[Instruction] = [*self._stragglers.observe(steps, generations)]
        if generations.phase is not _Phase.STEADY:
            return noticed
        self._speeds.stepped(len(self.members), steps)
        if self._profiling is not None:
            return [*noticed, *(self._measure(self._profiling, now) if self._profiling.add(steps) else ())]
        if self._schedule.postponed is not None and (begun := self._next(now)):
            return [*noticed, *begun]
        change = self._stragglers.decide(generations, now)
        return noticed if change is None else [*noticed, *self._begin(change, now)]

    def leaves(self, member: int, now: float) -> list[Instruction]:
        """A worker was sent SIGTERM."""
        newcomers = self.generations.newcomers
        if member in newcomers and self.generations.begun is None:
            reason = "was asked to leave"
            return [EndNewcomer(member, reason), *self.newcomer_gone(member, reason, now)]
        if member not in (*self.members, *newcomers) or member in self.leaving:
            return []
        if not self.training:
            return [TellMember(member, Terminate())]
        self.leaving = (*self.leaving, member)
        return [*self._abandon_profile(f"worker {member} leaves the job"), *self._next(now)]

    def end(self) -> list[Instruction]:
        """The job has ended: new workers are not needed."""
        self._schedule, self.training, self._recovery.deadline = Schedule(), False, None
        if self.generations.begun is not None:
            return [*self._put_in_force(), *self._abandon_profile("the job ended")]
        change, newcomers = self.generations.change, self.generations.newcomers
        ended: list[Instruction] = [
            EndNewcomer(member, "the job ended before it could join") for member in newcomers
        ]
        if change is not None:
            ended.append(ReconfigurationRefused(change, "the job ended before the change could be made"))
        self.generations.settle()
        return [*ended, *self._abandon_profile("the job ended")]

    # Requests.

    def busy(self) -> str | None:
        """Why no change can begin now."""
        if not self.training:
            return "the job has not begun to train yet; retry"
        if self._profiling is not None:
            return "busy with a profile; retry"
        phase, change = self.generations.phase, self.generations.change
        if phase is _Phase.RECOVERING:
            return "busy: a worker was lost, and the others are about to go on; retry"
        if phase is not _Phase.STEADY:
            assert change is not None
            return f"busy with another change (to {plural(change.workers, 'worker')}, {phase}); retry"
        return None

    def request_change(self, change: Reconfiguration, now: float) -> list[Instruction]:
        """A change of the workers is requested."""
        if (busy := self.busy()) is not None:
            return [ReconfigurationRefused(change, busy, retryable=True)]
        if (impossible := change.impossible(self.members, *self._limits)) is not None:
            return [ReconfigurationRefused(change, impossible, invalid=True)]
        if change.workers == len(self.members) and not change.without:
            return [self._already_done(change)]
        self._schedule.postponed = None
        return self._begin(change, now)

    def request_profile(self, profile: ProfileRequest, now: float) -> list[Instruction]:
        """A profile is requested: the job's speed on each number of workers."""
        if (busy := self.busy() or self._schedule.busy()) is not None:
            return [refused_profile(profile, len(self.members), busy, retryable=True)]
        if (impossible := profile.impossible(len(self.members), *self._limits)) is not None:
            return [refused_profile(profile, len(self.members), impossible, invalid=True)]
        self._profiling = Profiling.of(profile, len(self.members))
        return self._measure(self._profiling, now)

    # Reports of workers on a change.

    def ready(self, member: int, compatibility: dict[str, str], now: float) -> list[Instruction]:
        """A new worker has built its model."""
        if not self.generations.starts(member):
            return []
        ours = self._compatibility
        for name in sorted(ours.keys() | compatibility.keys()):
            if ours.get(name) != compatibility.get(name):
                its = f"its {name} is {compatibility.get(name)!r}, the job's {ours.get(name)!r}"
                return self._fail(f"the new worker {member} does not fit: {its}", now, final=True)
        return self.generations.ready(member)

    def prepared(self, member: int, generation: int) -> list[Instruction]:
        """A worker is connected to the next generation."""
        return self.generations.prepared(member, generation)

    def switched(
        self, member: int, generation: int, step: int, paused: float, now: float, why_all: str | None = None
    ) -> list[Instruction]:
        """A worker has begun the next generation."""
        in_force = self.generations.switched(member, generation, step, paused, now, why_all)
        return [*self._put_in_force(), *self._next(now)] if in_force else []

    def newcomer_gone(self, member: int, reason: str, now: float) -> list[Instruction]:
        """A new worker has ended before it joined."""
        generations = self.generations
        if member not in generations.newcomers:
            return []
        if generations.begun is not None:
            return self._put_in_force()  # it was a member for some already: the job has lost a worker
        generations.newcomers = tuple(other for other in generations.newcomers if other != member)
        return self._fail(f"the new worker {member} {reason} before it joined", now)

    # Recovery.

    def begin_recovery(self, lost: Sequence[int], reason: str, now: float) -> list[Instruction] | None:
        """Members have died while the job trained. None: no survivor can train on."""
        generations = self.generations
        if not self.training or not self._options.recovers:
            return None
        if lost and not set(lost) & {*self.members, *generations.newcomers}:
            return []  # nobody waits for them any more
        instructions: list[Instruction] = []
        absent: set[int] = {*lost, *self._recovery.left}
        if generations.begun is not None:  # in force for some, so for all; who has not arrived never will
            absent |= generations.waiting_for
            arriving = [member for member in generations.waiting_for if member not in lost]
            instructions += [*self._put_in_force(), *(EndNewcomer(member, reason) for member in arriving)]
        survivors = tuple(member for member in self.members if member not in absent)
        self._recovery.deadline = None
        if not survivors:
            return None
        if generations.phase not in (_Phase.STEADY, _Phase.RECOVERING):
            instructions += self._abandon_change(reason)
        gone = [member for member in self.members if member not in survivors]
        self._recovery.add(gone, self.leaving, reason)
        self.leaving = tuple(member for member in self.leaving if member in survivors)
        waits = len(survivors) < self._options.min_workers
        return [*instructions, *generations.recover(survivors, waits=waits)]

    def left(self, member: int, now: float) -> list[Instruction]:
        """A worker has left in good order, at a fence. A recovery that waits for it begins again without it."""
        self._recovery.left.add(member)
        if self.generations.phase is not _Phase.RECOVERING or member not in self.members:
            return []
        self.leaving = (*self.leaving, member)
        return self.begin_recovery((member,), self._recovery.reason, now) or []

    def peer_lost(self, generation: int, now: float) -> None:
        """A worker has lost a peer, and does not know which."""
        if self.training and self._options.recovers:
            self._recovery.peer_lost(generation, self.generations, now)

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        if not self.training:
            return None
        steady, broken = self.generations.phase is _Phase.STEADY, self._recovery.broken
        retry = self._schedule.deadline() if steady and not self.leaving else None
        deadlines = (self._recovery.deadline, retry, broken and broken[1])
        return min((at for at in deadlines if at is not None), default=None)

    def tick(self, now: float) -> list[Instruction]:
        if self._recovery.take_broken(self.generations, now):
            return self._fail("workers could not connect to each other", now, retryable=True)
        if self._recovery.deadline is not None and now >= self._recovery.deadline:
            return self.begin_recovery((), "connections among workers broke", now) or []
        return self._next(now) if self._schedule.postponed is not None else []

    def recovered(
        self, member: int, generation: int, placement: Placement, again: int, paused: float, now: float
    ) -> list[Instruction]:
        """A survivor is connected to the others."""
        generations, recovery = self.generations, self._recovery
        plan = generations.plan
        if generations.phase is not _Phase.RECOVERING or plan is None or generation != plan.generation:
            return []
        if member not in generations.waiting_for:
            return []
        generations.waiting_for.discard(member)
        recovery.redone, recovery.paused = recovery.redone + again, max(recovery.paused, paused)
        if generations.waiting_for:
            return []
        result, awaited = recovery.complete(generations), self._schedule.next_is_awaited(generations.step)
        if recovery.missed and self._profiling is None and not awaited:
            self._schedule.put_first(recovery.replacement(len(self.members)))
        recovery.clear()
        generations.recovered(placement)
        return [result, *self._next(now)]

    @property
    def target_workers(self) -> int:
        """The number of workers that the job should have: its members, and replacements of those that it has lost."""
        to_come = [self.generations.change, self._schedule.postponed, *self._schedule.changes[:1]]
        own = [each.workers for each in to_come if each is not None and (each.is_replacement or each.retries)]
        return max(len(self.members) + self._recovery.missed, *([] if self.profiling else own), 0)

    # The record for the next leader.

    def record(self) -> CoordinatorRecord:
        """Kept before the instructions that were returned with it are carried out."""
        profiling, recovery = self._profiling, self._recovery
        return CoordinatorRecord(
            **self.generations.record(),
            schedule=list(self._schedule.changes),
            training=self.training,
            compatibility=self._compatibility,
            leaving=self.leaving,
            profile=profiling.request if profiling is not None else None,
            original_size=profiling.original_size if profiling is not None else None,
            lost=recovery.lost,
            loss_reason=recovery.reason,
            missed=recovery.missed,
        )

    @classmethod
    def restore(
        cls,
        record: CoordinatorRecord,
        store: Callable[[int], str],
        options: CoordinatorOptions | None = None,
    ) -> Coordinator:
        """The coordinator as it was when the record was kept. `took_over` comes next."""
        restored = cls(Generations.restore(record, store), record.schedule, options, training=record.training)
        if record.profile is not None and record.original_size is not None:
            restored._profiling = Profiling(record.profile, record.original_size, [])
        restored.leaving, restored._compatibility = record.leaving, dict(record.compatibility)
        restored._recovery = RecoveryState(record.lost, record.loss_reason, record.missed)
        return restored

    def took_over(self, now: float) -> list[Instruction]:
        """This leader has replaced another one.

        A fence may hold already, so it stays set and is sent again. Before the fence nothing has begun: the change is
        cancelled, and requested again by its client or by the schedule.
        """
        generations, reason = self.generations, "the job's leader has changed meanwhile; retry"
        generations.since = now
        cancelled: list[Instruction] = []
        if self._profiling is not None:
            profiling, self._profiling = self._profiling, None
            cancelled.append(refused_profile(profiling.request, len(self.members), reason, retryable=True))
            back = "back from a profile that was broken off"
            self._schedule.put_first(Reconfiguration(workers=profiling.original_size, reason=back))
        if generations.phase is _Phase.STEADY:
            return [*cancelled, *self._next(now)]
        if generations.phase is _Phase.FENCED:
            return [*cancelled, *generations.set_fence()]
        if generations.phase is _Phase.RECOVERING:  # their rendezvous may have gone with the previous leader
            return [*cancelled, *(self.begin_recovery((), self._recovery.reason, now) or ())]
        return [*cancelled, *self._fail(reason, now, retryable=True)]

    # Which change comes next.

    def _next(self, now: float) -> list[Instruction]:
        """Begin the next change, if none is under way: leavers, then the profile, then the schedule."""
        if self.generations.phase is not _Phase.STEADY or not self.training:
            return []
        if self.leaving:
            return self._let_go(now)
        if self._profiling is not None:
            return self._measure(self._profiling, now)
        # The next entry of the schedule is prepared at once, however far away its step is.
        step, devices = self.generations.step, self._limits[1]
        while (change := self._schedule.pop(self.members, step, now, devices)) is not None:
            # Workers wait at its step, even if the number of workers does not change.
            if change.workers != len(self.members) or change.at_step is not None or change.without:
                return self._begin(change, now)
            if change.request is not None:  # a death has had the requested effect
                return [self._already_done(change), *self._next(now)]
        return []

    def _let_go(self, now: float) -> list[Instruction]:
        staying = [member for member in self.members if member not in self.leaving]
        if not staying:
            return [TellMember(self.members[0], Terminate())]
        reason = f"{numbered('worker', self.leaving)} asked to leave by SIGTERM"
        return self._begin(Reconfiguration(workers=len(staying), reason=reason, without=self.leaving), now)

    def _begin(self, change: Reconfiguration, now: float) -> list[Instruction]:
        last, count = self._tried
        self.generations.since, self._tried = now, (change, count + 1 if change == last else 1)
        return self.generations.begin(change)

    def _already_done(self, change: Reconfiguration) -> ReconfigurationDone:
        size = len(self.members)
        return ReconfigurationDone(change, self.generations.step, size, size, 0.0, 0.0, ())

    def _put_in_force(self) -> list[Instruction]:
        done = self.generations.put_in_force()
        self.leaving = tuple(member for member in self.leaving if member in self.members)
        return done

    def _fail(
        self, reason: str, now: float, *, final: bool = False, retryable: bool = False
    ) -> list[Instruction]:
        """The change under way is cancelled. One that workers wait for is tried again; in the end they go on without it."""
        change = self.generations.change
        assert change is not None
        instructions = self.generations.cancel(reason)
        if self._profiling is not None:
            return [*instructions, *self._abandon_profile(reason), *self._next(now)]
        too_few = change.request is None and len(self.members) < self._options.min_workers
        waited_for = change.at_step is not None or too_few
        if waited_for and not final and self._tried[1] < _TRIES:
            return [*instructions, *self._begin(change, self.generations.since)]
        if too_few:
            return [
                *instructions,
                GiveUp(f"{reason}; workers wait until there are {change.workers} ({change.reason})"),
            ]
        if not final and (waited_for or change.retries or change.is_replacement):
            self._schedule.postpone(change, now)
            reason = f"{reason}; it is tried again later, and training goes on meanwhile"
        refused = ReconfigurationRefused(change, reason, retryable)
        if not waited_for:
            return [*instructions, refused, *self._next(now)]
        # A generation of the same members ends the wait of the workers.
        as_it_is = Reconfiguration(workers=len(self.members), at_step=change.at_step, reason=reason)
        return [*instructions, refused, *self._begin(as_it_is, now)]

    def _abandon_change(self, reason: str) -> list[Instruction]:
        """A member was lost during a change: the change begins again after the recovery."""
        change = self.generations.change
        assert change is not None
        if change.request is not None or change.at_step is not None:
            self._schedule.put_first(change)
        elif change.workers > len(self.members):  # workers lost before have not been replaced yet
            self._recovery.missed += change.workers - len(self.members)
        return self.generations.abandon(reason)

    # Profiles.

    def _measure(self, profiling: Profiling, now: float) -> list[Instruction]:
        if profiling.target != len(self.members):
            return self._begin(Reconfiguration(workers=profiling.target, reason="profile"), now)
        if profiling.sizes:
            profiling.begin(self.generations.step)
            return []
        self._profiling = None
        return [ProfileDone(profiling.request, profiling.table(self._speeds)), *self._next(now)]

    def _abandon_profile(self, reason: str) -> list[Instruction]:
        profiling, self._profiling = self._profiling, None
        if profiling is None:
            return []
        size = len(self.members)
        where = f"the job runs on {plural(size, 'worker')} and had {profiling.original_size}"
        return [refused_profile(profiling.request, size, f"the profile was broken off: {reason}; {where}")]

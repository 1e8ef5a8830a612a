"""The generation in force, and the change to the next one: which workers take part, and how far each of them is.

`Generations` owns the phase of a change (`ReconfigurationPhase` has the table) and makes the messages of each phase.
`coordinator` decides which change to make, and what follows when one is complete or has failed. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyrostat.core.job import NextGeneration
from gyrostat.core.phase import RECONFIGURATION_TRANSITIONS, ReconfigurationPhase, transition
from gyrostat.core.placement import Placement
from gyrostat.job.control.coordinator_record import CoordinatorRecord
from gyrostat.job.control.instructions import (
    EndNewcomer,
    Instruction,
    Reconfiguration,
    ReconfigurationDone,
    StartNewcomer,
    TellMember,
)
from gyrostat.job.processes.protocol import BeginRecovery, Cancel, Prepare, SetFence

_Phase = ReconfigurationPhase


@dataclass
class Generations:
    """The workers of one job."""

    virtual_workers: int
    members: tuple[int, ...]
    """Worker 0, 1, 2 … of the generation in force."""
    store: Callable[[int], str]
    """The rendezvous of a generation."""
    placement: Placement | None = None
    """In force; None: as even as possible."""
    current: int = 1
    """The generation in force, or the last number that was used up."""
    phase: ReconfigurationPhase = ReconfigurationPhase.STEADY
    step: int = 0
    """The last step that is known to be complete."""
    began_at: int = 0
    """The boundary at which the generation in force began."""
    change: Reconfiguration | None = None
    since: float = 0.0
    """When the change was requested."""
    plan: NextGeneration | None = None
    next_member: int = 0
    newcomers: tuple[int, ...] = ()
    """Workers that are started but not yet members."""
    waiting_for: set[int] = field(default_factory=set)
    """Workers whose report ends the phase."""
    begun: ReconfigurationDone | None = None
    """The next generation has begun on some workers: it can no longer be cancelled."""

    def __post_init__(self) -> None:
        self.next_member = self.next_member or max(self.members) + 1

    # A change: STARTING_WORKERS, CONNECTING, FENCED.

    def begin(self, change: Reconfiguration) -> list[Instruction]:
        """Start the new workers that a change needs; without any, connect at once."""
        self.change = change
        more = change.workers - len(self._staying(change))
        self.newcomers = tuple(range(self.next_member, self.next_member + more))
        self.next_member += more
        if not self.newcomers:
            return self._connect()
        self._enter(_Phase.STARTING_WORKERS)
        self.waiting_for = set(self.newcomers)
        return [StartNewcomer(member) for member in self.newcomers]

    def starts(self, member: int) -> bool:
        """Whether the change waits for this new worker to be ready."""
        return self.phase is _Phase.STARTING_WORKERS and member in self.waiting_for

    def ready(self, member: int) -> list[Instruction]:
        """A new worker has built its model. When all have, all connect."""
        self.waiting_for.discard(member)
        return [] if self.waiting_for else self._connect()

    def prepared(self, member: int, generation: int) -> list[Instruction]:
        """A worker is connected to the next generation. When all are, the fence is set."""
        if self.plan is None or generation != self.plan.generation or self.phase is not _Phase.CONNECTING:
            return []
        self.waiting_for.discard(member)
        if self.waiting_for:
            return []
        self._enter(_Phase.FENCED)
        return self.set_fence()

    def set_fence(self) -> list[Instruction]:
        self.waiting_for = set(self.newcomers)
        return [TellMember(member, self._fence()) for member in self.members]

    def switched(
        self, member: int, generation: int, step: int, paused: float, now: float, why_all: str | None
    ) -> bool:
        """A worker has begun the next generation. True if it is in force: all new workers have begun it, or, without
        any, some worker has."""
        if self.plan is None or generation != self.plan.generation:
            return False
        assert self.change is not None
        before = self.begun
        self.begun = ReconfigurationDone(
            self.change,
            step,
            len(self.members),
            len(self.plan.members),
            max(paused, before.paused if before else 0.0),
            now - self.since,
            self.plan.newcomers,
            why_all or (before.why_all if before else None),
        )
        self.waiting_for.discard(member)
        return not self.waiting_for

    def put_in_force(self) -> list[Instruction]:
        """The generation that has begun is the job's."""
        if self.begun is None:
            return []
        assert self.plan is not None
        done, self.members, self.current = self.begun, self.plan.members, self.plan.generation
        self.step = max(self.step, done.step)
        self.placement, self.began_at = self.plan.placement, done.step
        self.settle()
        return [done]

    def cancel(self, reason: str) -> list[Instruction]:
        """Before the fence holds: the new workers end, the members train on."""
        instructions: list[Instruction] = [EndNewcomer(member, reason) for member in self.newcomers]
        if self.plan is not None:
            instructions += [TellMember(member, Cancel(self.plan.generation)) for member in self.members]
            self.current = self.plan.generation  # used up: a message of it must not be taken for another's
        self.settle()
        return instructions

    def settle(self) -> None:
        """No change is under way."""
        self._enter(_Phase.STEADY)
        self.change, self.plan, self.begun = None, None, None
        self.newcomers, self.waiting_for = (), set()

    # Recovery.

    def abandon(self, reason: str) -> list[Instruction]:
        """The change under way ends because a member was lost; recovery replaces its generation."""
        newcomers, number = self.newcomers, self.current if self.plan is None else self.plan.generation
        self.settle()
        self.current = number
        return [EndNewcomer(member, reason) for member in newcomers]

    def recover(self, survivors: Sequence[int], *, waits: bool) -> list[Instruction]:
        """The survivors connect as a generation of their own."""
        number = max(self.current, self.plan.generation if self.plan is not None else 0) + 1
        self.members = tuple(survivors)
        self._enter(_Phase.RECOVERING)
        self.waiting_for = set(survivors)
        self.plan = NextGeneration(
            generation=number,
            placement=Placement.even(self.virtual_workers, len(survivors)),
            members=self.members,
            newcomers=(),
            donor=survivors[0],
            store=self.store(number),
            is_recovery=True,
            waits=waits,
        )
        return [TellMember(member, BeginRecovery(self.plan)) for member in survivors]

    def recovered(self, placement: Placement) -> None:
        """All survivors are connected, with this placement."""
        assert self.plan is not None
        self.current, self.placement, self.began_at = self.plan.generation, placement, self.step + 1
        self.settle()

    # The record for the next leader.

    @classmethod
    def restore(cls, record: CoordinatorRecord, store: Callable[[int], str]) -> Generations:
        """As they were when the record was kept."""
        return cls(
            record.virtual_workers,
            record.members,
            store,
            record.placement,
            current=record.generation,
            phase=record.phase,
            step=record.step,
            change=record.change,
            plan=record.plan,
            next_member=record.next_member,
            newcomers=record.newcomers,
        )

    def record(self) -> dict[str, Any]:
        """Its part of the record, by the record's names."""
        return {
            "virtual_workers": self.virtual_workers,
            "members": self.members,
            "generation": self.current,
            "phase": self.phase,
            "step": self.step,
            "change": self.change,
            "next_member": self.next_member,
            "newcomers": self.newcomers,
            "plan": self.plan,
            "placement": self.placement,
        }

    # Queries.

    def resend(self, member: int) -> list[Instruction]:
        """The message that a worker may have missed while its agent was away."""
        if self.plan is None:
            return []
        if self.phase is _Phase.CONNECTING and member in self.waiting_for:
            return [TellMember(member, Prepare(self.plan))]
        if self.phase is _Phase.FENCED and member in self.members:
            return [TellMember(member, self._fence())]
        if self.phase is _Phase.RECOVERING and member in self.waiting_for:
            return [TellMember(member, BeginRecovery(self.plan))]
        return []

    @property
    def expected(self) -> tuple[int, ...]:
        """Workers for which others wait, or soon may."""
        connects = self.phase in (_Phase.CONNECTING, _Phase.FENCED)
        return (*self.members, *(self.newcomers if connects else ()))

    @property
    def next_members(self) -> tuple[int, ...]:
        """The members after the change that is under way, if one is."""
        return self.members if self.change is None else (*self._staying(self.change), *self.newcomers)

    @property
    def counts(self) -> list[int]:
        """Virtual workers of each member."""
        assert self.placement is not None
        return [len(self.placement.held_by(worker)) for worker in range(len(self.members))]

    # Internals.

    def _connect(self) -> list[Instruction]:
        assert self.change is not None
        stay = self._staying(self.change)
        self.plan = NextGeneration(
            generation=self.current + 1,
            placement=Placement.even(self.virtual_workers, self.change.workers)
            if self.change.counts is None
            else Placement.from_counts(self.change.counts),
            members=(*stay, *self.newcomers),
            newcomers=self.newcomers,
            donor=stay[-1] if stay else self.members[0],
            store=self.store(self.current + 1),
            at_step=self.change.at_step,
        )
        self._enter(_Phase.CONNECTING)
        everyone = (*self.members, *self.newcomers)
        self.waiting_for = set(everyone)
        return [TellMember(member, Prepare(self.plan)) for member in everyone]

    def _staying(self, change: Reconfiguration) -> tuple[int, ...]:
        """The first members stay, so that worker 0 rarely changes."""
        return tuple(member for member in self.members if member not in change.without)[: change.workers]

    def _fence(self) -> SetFence:
        assert self.change is not None
        assert self.plan is not None
        return SetFence(self.plan.generation, self.change.at_step or 0)

    def _enter(self, phase: ReconfigurationPhase) -> None:
        """The only place that changes the phase."""
        self.phase = transition(self.phase, phase, RECONFIGURATION_TRANSITIONS)

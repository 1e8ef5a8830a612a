"""How a worker passes from one generation to the next, or joins a job: carries out what `Membership` has agreed on.

An old member sends its state to newcomers (`StateSender`), hands over data positions ahead of the fence, and at the fence
exchanges contexts, sends newcomers the rest, and moves or leaves. A newcomer waits in the first loop of its script: it replays
the state it receives, prepares what a first step needs, resumes at the fence, and reports when all state is in place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from gyrostat.core.errors import PeerLost
from gyrostat.core.job import NextGeneration
from gyrostat.core.progress import Progress
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.position import Position
from gyrostat.engine.checkpoint.capture import gather_contexts, without
from gyrostat.engine.checkpoint.manager import Boundary, CheckpointManager, Target
from gyrostat.engine.reconfigure.arrival_timeout import ArrivalTimeout
from gyrostat.engine.reconfigure.catch_up import StateReceiver, StateSender, owned_by
from gyrostat.engine.reconfigure.handover import Handover
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reconfigure.phases import PreparedGeneration
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.trace import now
from gyrostat.engine.training.collectives import Collectives, PeerRecovery
from gyrostat.engine.training.loop_length import LoopLength
from gyrostat.engine.training.plan import DataLoop
from gyrostat.engine.training.reports import PassOutcome
from gyrostat.engine.training.virtual_workers import VirtualWorkers

logger = logging.getLogger(__name__)


class Left(SystemExit):
    """This worker is not in the generation that has begun: it leaves the job, which goes on without it."""


class NoTransition:
    """The generation of this worker never changes."""

    def pass_done(self, outcome: PassOutcome, progress: Progress) -> None:
        """A pass has settled."""

    def before_update(self, name: str, optimizer: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        """The script is about to call `optimizer.step`."""

    def boundary(self, here: Boundary) -> None:
        """If a generation begins at this boundary, be a part of it, or leave."""

    def hold(self, here: Boundary) -> None:
        """A newcomer has joined at this boundary: wait if all others still do."""

    def join(self, tracked: Mapping[str, Any]) -> Target:
        """A newcomer: wait until its first generation begins. Returns where to resume."""
        raise NotImplementedError

    def arrived(self, progress: Progress) -> None:
        """A newcomer has loaded all state that it received at the fence."""


class Transition(NoTransition):
    """This worker's generations."""

    def __init__(
        self,
        membership: Membership,
        workers: VirtualWorkers,
        collectives: Collectives,
        recovery: PeerRecovery,
        checkpoints: CheckpointManager,
        supervisor: Supervisor,
        *,
        length: LoopLength,
        loaders: Mapping[int, OrderedLoader],
        holds: Sequence[int],
        seed: int,
    ) -> None:
        """`loaders`: the script's, by number. `holds`: steps at whose boundaries all wait for the generation that is scheduled
        there."""
        self._membership, self._workers, self._collectives = membership, workers, collectives
        self._recovery, self._checkpoints, self._supervisor = recovery, checkpoints, supervisor
        self._length, self._loaders, self._holds, self._seed = length, loaders, set(holds), seed
        self._waits: set[int] = set()  # steps at whose boundaries too few survivors wait for any generation
        self._sender: StateSender | None = None  # while newcomers replay what this worker does
        self._positions: dict[tuple[int, ...], dict[int, Position]] = {}  # received so far, by loop
        self._arrival: tuple[PreparedGeneration, StateReceiver, Handover] | None = None  # until all is loaded
        self._arrival_timeout: ArrivalTimeout | None = None  # as long

    # Old members, while they train.

    def pass_done(self, outcome: PassOutcome, progress: Progress) -> None:
        if self._sender is not None:
            self._sender.settle()
        self._membership.settled(outcome.fence)
        change = self._membership.prepared_change()
        if change is None:
            self._workers.relocation.call_off()
            return
        plan, step = change
        step = step if step is not None else plan.at_step
        step = step if step is not None else min(self._waits, default=None)
        if step is not None:
            self._workers.relocation.announce(plan.placement, self._membership.worker_in(plan), step)
        if step is not None and outcome.leaving:
            self._prepare_data(outcome.leaving, step, progress)

    def _prepare_data(self, leaving: Mapping[int, Any], step: int, progress: Progress) -> None:
        """The data positions of virtual workers that move are known: their next workers can make batches ahead."""
        self._workers.relocation.expect(leaving)
        loop = self._workers.batches.loop_at(progress.done + step - progress.step)
        if self._sender is not None and loop is not None:
            self._sender.send_data(
                {
                    "loader": loop.loader.number,
                    "epoch": loop.epoch,
                    "accumulate": loop.accumulate,
                    "first_batch": loop.first_batch,
                    "positions": dict(leaving),
                }
            )

    def before_update(self, name: str, optimizer: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        if self._sender is not None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._sender.before_update(name, optimizer, repeatable=closure is None)

    # The boundary.

    def boundary(self, here: Boundary) -> None:
        step = here.progress.step
        if not self._is_held(step):
            if (connected := self._membership.connected()) is not None:
                self._begin_sending(connected, here)
            prepared = self._membership.at_boundary(step)
            if prepared is not None:
                self._switch(prepared, here, now())
        self.hold(here)

    def hold(self, here: Boundary) -> None:
        """Wait while workers are held at this boundary. Another generation may begin here before the scheduled one."""
        began = now()
        while self._is_held(here.progress.step):
            prepared = self._wait(here)
            if self._switch(prepared, here, began):
                self._release(prepared.plan, here.progress.step)

    def _is_held(self, step: int) -> bool:
        return step in self._holds or step in self._waits

    def _release(self, plan: NextGeneration, step: int) -> None:
        """This generation has begun at the boundary of `step`. Only the one that is scheduled there ends a scheduled hold."""
        self._waits.discard(step)
        if plan.at_step is not None:
            self._holds = {held for held in self._holds if held > plan.at_step}

    def _wait(self, here: Boundary) -> PreparedGeneration:
        """Until a generation can begin, with the members that are left by then."""
        while True:
            try:
                return self._membership.wait_at_boundary(
                    self._workers.generation.group.generation,
                    lambda connected: self._begin_sending(connected, here),
                )
            except PeerLost as lost:
                self._recovery.recover(lost, None)

    def recovered(self, main_lost: bool, wait_at: int | None) -> None:
        """The survivors of a death go on: the change that was being prepared is cancelled.

        `wait_at`: the step at whose boundary they wait for newcomers, if they are too few.
        """
        if wait_at is not None:
            self._waits.add(wait_at)
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _begin_sending(self, prepared: PreparedGeneration, here: Boundary) -> None:
        """The donor: from this boundary on, newcomers replay what it does."""
        if prepared.wire is not None and prepared.sender is None:
            loop = self._workers.batches.loop
            hints = {
                "loader": None if loop is None else loop.loader.number,
                "reductions": self._workers.gradients.layouts(),
            }
            self._sender = StateSender(prepared.wire, _optimizers(here.tracked), hints)
            prepared.attach(self._sender)

    def _switch(self, prepared: PreparedGeneration, here: Boundary, began: int) -> bool:
        """False: a worker was lost, and no member has passed the fence."""
        generation = self._workers.generation
        old = generation.group
        if prepared.sender is not None:
            prepared.sender.at_fence()
        # A member that had not arrived here when a worker was lost has cancelled the change, and will not arrive.
        contexts = gather_contexts(self._workers, self._collectives, here.progress, once=True)
        if generation.group is not old:
            return bool(contexts)  # a worker was lost: the survivors go on without this change
        if self._membership.is_leaving(prepared.plan, worker=generation.main_worker):
            self._checkpoints.writer_leaves()
        sender, self._sender = prepared.sender, None
        if sender is not None:
            sender.end(self._rest(sender, here, contexts, began))
        if prepared.group is None:
            self._checkpoints.leave(here, contexts)
        else:
            self._workers.relocation.move(
                prepared.plan.placement, prepared.group, contexts, done=here.progress.done
            )
            old.close()
            self._membership.moved(prepared.plan)
        if sender is not None:
            sender.join()
        if prepared.group is None:
            self._membership.left()
            raise Left(0)
        self._report_switch(prepared.plan, here.progress, (now() - began) / 1e9)
        return True

    def _report_switch(
        self, plan: NextGeneration, progress: Progress, paused: float, why_all: str | None = None
    ) -> None:
        self._supervisor.switched(plan.generation, progress.step, plan.placement.workers, paused, why_all)
        logger.info(
            "generation %d begins on %d workers; this one paused for %.0f ms%s",
            plan.generation,
            plan.placement.workers,
            paused * 1e3,
            "" if why_all is None else f" and received all state at the fence: {why_all}",
            extra={"generation": plan.generation, "step": progress.step},
        )

    def _rest(
        self, sender: StateSender, here: Boundary, contexts: Sequence[Any], began: int
    ) -> dict[str, Any]:
        """What newcomers do not hold yet."""
        snapshot = self._checkpoints.snapshot(here, contexts)
        if sender.broken is None:
            optimizers = _optimizers(here.tracked)
            snapshot = replace(snapshot, shared=without(snapshot.shared, optimizers, owned_by(optimizers)))
        loop = self._workers.batches.loop
        return Handover(
            snapshot=snapshot,
            turns=self._checkpoints.turns(),
            batches=None if loop is None else loop.batches,
            completed_collectives=self._workers.log.completed,
            since=began,
        ).to_tree()

    # Newcomers.

    def join(self, tracked: Mapping[str, Any]) -> Target:
        self._supervisor.ready(self._checkpoints.describe(tracked))
        logger.info("ready to join")
        prepared = self._membership.wait_until_connected()
        assert prepared.wire is not None
        assert prepared.group is not None
        receiver = StateReceiver(prepared.wire, _optimizers(tracked))
        rest = receiver.follow(
            caught_up=lambda: self._membership.caught_up(prepared.plan),
            take_hints=lambda hints: self._warm_up(prepared, hints),
            take_data=lambda data: self._prefill(prepared.plan, data),
        )
        handover = Handover.from_tree(rest)
        if not prepared.wire.shared:  # another machine, whose clock is another
            handover = replace(handover, since=now())
        step = handover.snapshot.progress.step
        self._arrival_timeout = ArrivalTimeout(prepared.plan.donor, step, self._supervisor.not_arrived)
        self._length.receive(handover.batches)
        self._workers.log.join_at(handover.completed_collectives)
        self._workers.contexts.replace({})
        self._workers.relocation.move(prepared.plan.placement, prepared.group, handover.snapshot.contexts)
        target = self._checkpoints.adopt(handover.snapshot, handover.turns)
        self._membership.moved(prepared.plan)
        self._release(prepared.plan, target.progress.step)
        self._arrival = prepared, receiver, handover
        return target

    def arrived(self, progress: Progress) -> None:
        if self._arrival is None:
            return
        (prepared, receiver, handover), self._arrival = self._arrival, None
        receiver.confirm()
        if self._arrival_timeout is not None:
            self._arrival_timeout.arrived()
        self._report_switch(prepared.plan, progress, (now() - handover.since) / 1e9, receiver.why_not)

    def _warm_up(self, prepared: PreparedGeneration, hints: Mapping[str, Any]) -> None:
        """Do what takes time in a first step while the others train."""
        assert prepared.group is not None
        plan = prepared.plan
        self._workers.relocation.reducers.prepare_to_join(plan.placement, prepared.group, hints["reductions"])
        if hints["loader"] in self._loaders:
            self._workers.batches.prefill.warm_up(self._loaders[hints["loader"]], self._local_ranks(plan))

    def _prefill(self, plan: NextGeneration, data: Mapping[str, Any]) -> None:
        """Collect the data positions of the virtual workers that will be local here; once all are known, make batches."""
        if data["loader"] not in self._loaders:
            return
        loader, wanted = self._loaders[data["loader"]], self._local_ranks(plan)
        key = (data["loader"], data["epoch"], data["accumulate"], data["first_batch"])
        known = self._positions.setdefault(key, {})
        known |= {
            rank: Position.from_tree(tree) for rank, tree in data["positions"].items() if rank in wanted
        }
        if len(known) == len(wanted):
            loop = DataLoop(
                loader=loader,
                order=loader.order(seed=self._seed, epoch=data["epoch"]) if loader.ordered else None,
                epoch=data["epoch"],
                accumulate=data["accumulate"],
                first_batch=data["first_batch"],
            )
            self._workers.batches.prefill.fill(loop, self._positions.pop(key))

    def _local_ranks(self, plan: NextGeneration) -> Sequence[int]:
        worker = self._membership.worker_in(plan)
        assert worker is not None
        return plan.placement.held_by(worker)


def _optimizers(tracked: Mapping[str, Any]) -> dict[str, Optimizer]:
    return {name: thing for name, thing in tracked.items() if isinstance(thing, Optimizer)}

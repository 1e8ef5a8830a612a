"""How a worker passes from one generation to the next, or joins a job: what `Membership` agrees on is carried out here.

An old member lets newcomers follow it (`StateSender`), hands over data ahead of the fence, and at the fence exchanges contexts,
tells newcomers the rest, and moves or leaves. A newcomer waits in the first loop of its script: it follows, warms up what a
first step needs, goes on from the fence as a resumed job does, and reports when all state is in place.
"""

from __future__ import annotations

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
from gyrostat.engine.reconfigure.catch_up import StateReceiver, StateSender, owned_by
from gyrostat.engine.reconfigure.handover import Handover
from gyrostat.engine.reconfigure.membership import Membership, PreparedGeneration
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.trace import now
from gyrostat.engine.training.heap import touch_room_for
from gyrostat.engine.training.runner import DataLoop, PassOutcome
from gyrostat.engine.training.virtual import VirtualRunner


class Left(SystemExit):
    """This worker is not in the generation that has begun: it leaves the job, which goes on without it."""


class Transition:
    """This worker's generations."""

    def __init__(
        self,
        membership: Membership,
        runner: VirtualRunner,
        checkpoints: CheckpointManager,
        supervisor: Supervisor,
        *,
        holds: Sequence[int],
        seed: int,
    ) -> None:
        """`holds`: steps at whose boundaries the generation changes in any case."""
        self._membership, self._runner, self._checkpoints = membership, runner, checkpoints
        self._supervisor, self._holds, self._seed = supervisor, set(holds), seed
        self.loaders: dict[int, OrderedLoader] = {}
        """The script's, by number."""
        self._stream: StateSender | None = None  # while newcomers follow what this worker does
        self._coming: dict[tuple[int, ...], dict[int, Position]] = {}
        self._arrival: tuple[PreparedGeneration, StateReceiver, Handover] | None = (
            None  # until this newcomer has loaded all
        )

    # Old members, while they train.

    def pass_done(self, outcome: PassOutcome, progress: Progress) -> None:
        """A pass has settled: what the others said is known."""
        if self._stream is not None:
            self._stream.settle()
        self._membership.settled(outcome.fence)
        to_come = self._membership.change_to_come()
        if to_come is None:
            self._runner.call_off()
            return
        plan, step = to_come
        step = step if step is not None else min(self._holds, default=None)
        if step is not None:
            self._runner.announce(plan.placement, self._membership.worker_in(plan), step)
        if step is not None and outcome.leaving:
            self._prepare_data(outcome.leaving, step, progress)

    def _prepare_data(self, leaving: Mapping[int, Any], step: int, progress: Progress) -> None:
        """Virtual workers that move will stand there in the data: whoever gets them can have it made ready."""
        self._runner.expect(leaving)
        loop = self._runner.loop_at(step, progress)
        if self._stream is not None and loop is not None:
            self._stream.tell_data(
                {
                    "loader": loop.loader.number,
                    "epoch": loop.epoch,
                    "accumulate": loop.accumulate,
                    "first_batch": loop.first_batch,
                    "positions": dict(leaving),
                }
            )

    def before_update(self, name: str, optimizer: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        """The script is about to call `optimizer.step`."""
        if self._stream is not None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._stream.before_update(name, optimizer, repeatable=closure is None)

    # The boundary.

    def boundary(self, here: Boundary) -> None:
        """If a generation begins at this boundary, be a part of it, or leave."""
        step, began = here.progress.step, now()
        held = step in self._holds
        if held:
            self._holds.remove(step)  # a loop that ends and one that begins can meet at one step
            prepared: PreparedGeneration | None = self._wait(here)
        else:
            if (connected := self._membership.connected()) is not None:
                self._let_follow(connected, here)
            prepared = self._membership.at_boundary(step)
        while prepared is not None and not self._switch(prepared, here, began):
            prepared = self._wait(here) if held else None

    def _wait(self, here: Boundary) -> PreparedGeneration:
        """Until the scheduled generation can begin, with whoever is left by then."""
        while True:
            try:
                return self._membership.wait_here(
                    self._runner.group.generation, lambda connected: self._let_follow(connected, here)
                )
            except PeerLost as lost:
                self._runner.recover(lost, None)

    def recovered(self, wait_at: int | None) -> None:
        """Another worker was lost, and those that are left go on: what was being prepared will not be.

        `wait_at`: a boundary at which they wait for others, for they are too few.
        """
        if wait_at is not None:
            self._holds.add(wait_at)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _let_follow(self, prepared: PreparedGeneration, here: Boundary) -> None:
        """The donor: from this boundary on, newcomers follow what it does."""
        if prepared.wire is not None and prepared.stream is None:
            loop = self._runner.loop_at(here.progress.step, here.progress)
            hints = {
                "loader": None if loop is None else loop.loader.number,
                "reductions": self._runner.layouts(),
            }
            self._stream = prepared.stream = StateSender(prepared.wire, _optimizers(here.tracked), hints)

    def _switch(self, prepared: PreparedGeneration, here: Boundary, began: int) -> bool:
        """False: a worker was lost, and nobody has passed the fence."""
        old = self._runner.group
        if prepared.stream is not None:
            prepared.stream.at_fence()
        # Who had not come so far when a worker was lost has called the change off, and will not come here.
        contexts = gather_contexts(self._runner, here.progress, once=True)
        if self._runner.group is not old:
            return bool(contexts)  # a worker was lost: those that are left go on without this change
        if self._membership.is_leaving(prepared.plan, worker=self._runner.placement.owner(0)):
            self._checkpoints.writer_leaves()
        stream, self._stream = prepared.stream, None
        if stream is not None:
            stream.end(self._rest(stream, here, contexts, began))
        if prepared.group is None:
            self._checkpoints.leave(here, contexts)
        else:
            self._runner.move(prepared.plan.placement, prepared.group, contexts, done=here.progress.done)
            old.close()
            self._membership.moved(prepared.plan)
        if stream is not None:
            stream.join()
        if prepared.group is None:
            raise Left(0)
        self._supervisor.switched(
            prepared.plan.generation, here.progress.step, prepared.group.size, (now() - began) / 1e9
        )
        return True

    def _rest(
        self, stream: StateSender, here: Boundary, contexts: Sequence[Any], began: int
    ) -> dict[str, Any]:
        """What newcomers do not hold yet."""
        snapshot = self._checkpoints.snapshot(here, contexts)
        if stream.broken is None:
            optimizers = _optimizers(here.tracked)
            snapshot = replace(snapshot, shared=without(snapshot.shared, optimizers, owned_by(optimizers)))
        return Handover(
            snapshot=snapshot,
            turns=self._checkpoints.turns(),
            batches=self._runner.loop_batches,
            completed_collectives=self._runner.completed_collectives,
            since=began,
        ).to_tree()

    # Newcomers.

    def join(self, tracked: Mapping[str, Any]) -> Target:
        """Wait until a generation that this worker belongs to begins. Returns where to go on from."""
        self._supervisor.ready(self._checkpoints.describe(tracked))
        prepared = self._membership.wait_until_invited()
        assert prepared.wire is not None
        assert prepared.group is not None
        follower = StateReceiver(prepared.wire, _optimizers(tracked))
        told = follower.follow(
            caught_up=lambda: self._membership.caught_up(prepared.plan),
            take_hints=lambda hints: self._warm_up(prepared, hints),
            hear_of_data=lambda data: self._prefill(prepared.plan, data),
        )
        handover = Handover.from_tree(told)
        if not prepared.wire.shared:  # another machine, whose clock is another
            handover = replace(handover, since=now())
        self._runner.handed_batches, self._runner.completed_collectives = (
            (handover.batches,),
            handover.completed_collectives,
        )
        self._runner.contexts.clear()
        self._runner.move(prepared.plan.placement, prepared.group, handover.snapshot.contexts)
        target = self._checkpoints.adopt(handover.snapshot, handover.turns)
        self._membership.moved(prepared.plan)
        self._holds.discard(target.progress.step)
        self._arrival = prepared, follower, handover
        return target

    def arrived(self, progress: Progress) -> None:
        """All that was told at the fence is loaded: make sure that the rest is right, and say so."""
        if self._arrival is None:
            return
        (prepared, follower, handover), self._arrival = self._arrival, None
        follower.confirm()
        self._supervisor.switched(
            prepared.plan.generation,
            progress.step,
            prepared.plan.placement.workers,
            (now() - handover.since) / 1e9,
            follower.why_not,
        )

    def _warm_up(self, prepared: PreparedGeneration, hints: Mapping[str, Any]) -> None:
        """What takes time in a first step is done while the others train."""
        assert prepared.group is not None
        plan = prepared.plan
        self._runner.prepare_to_move(plan.placement, prepared.group, hints["reductions"])
        touch_room_for(
            parameter for gradients in self._runner.gradients for parameter in gradients.parameters
        )
        if hints["loader"] in self.loaders:
            self._runner.warm_up(self.loaders[hints["loader"]], self._hosted(plan))

    def _prefill(self, plan: NextGeneration, data: Mapping[str, Any]) -> None:
        """Its virtual workers will stand there in the data. What all hosts say is collected."""
        if data["loader"] not in self.loaders:
            return
        loader, wanted = self.loaders[data["loader"]], self._hosted(plan)
        key = (data["loader"], data["epoch"], data["accumulate"], data["first_batch"])
        known = self._coming.setdefault(key, {})
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
            self._runner.prefill(loop, self._coming.pop(key))

    def _hosted(self, plan: NextGeneration) -> Sequence[int]:
        worker = self._membership.worker_in(plan)
        assert worker is not None
        return plan.placement.held_by(worker)


def _optimizers(tracked: Mapping[str, Any]) -> dict[str, Optimizer]:
    return {name: thing for name, thing in tracked.items() if isinstance(thing, Optimizer)}

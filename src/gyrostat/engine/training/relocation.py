"""Virtual workers that change their worker: planned, at a fence, and after a death, in the middle of whatever runs.

Planned: `announce` gives the local virtual workers from the boundary of a step on. Their positions in the data travel with
the reports of the passes before it, so that data workers can make their batches ahead. `move` carries it out.

After a death: the survivors have agreed on a placement (`engine/reconfigure/recovery.py`), and `follow` carries it out. Virtual
workers of the dead worker arrive here with backed-up contexts. In a pass they run their micro-batches before the reduction is
repeated; in approximate recovery they are left out of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyrostat.core.placement import Placement
from gyrostat.core.progress import Progress
from gyrostat.engine.state import statetree
from gyrostat.engine.training.backups import ContextBackups, decode_changes, encode_changes
from gyrostat.engine.training.batch_sources import BatchSources
from gyrostat.engine.training.context import Context
from gyrostat.engine.training.context_switch import ContextSwitch
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.gradient_sync import GradientSync
from gyrostat.engine.training.plan import StepPlan
from gyrostat.engine.training.reducer_switch import ReducerSwitch
from gyrostat.engine.transport.group import WorkerGroup

_LEAD = 2
"""Steps between the agreement on a fence and the fence, where data workers look ahead."""


@dataclass
class _Announced:
    """The virtual workers that will be local from the boundary of a step on."""

    local_ranks: Sequence[int]
    step: int
    sent: set[int] = field(default_factory=set)
    """Of those that leave: whose positions have been sent."""


class NoRelocation:
    """Virtual workers stay where they are: what a runner without relocation needs."""

    arrivals: Sequence[int] = ()
    """Virtual workers that arrived in the middle of the pass, and have not run yet."""
    dropped: Sequence[int] = ()
    """Virtual workers of a dead worker that this worker leaves out of the pass."""

    @property
    def fence_lead(self) -> int:
        """How many steps ahead a fence should be known."""
        return 0

    def begin_pass(self) -> None: ...

    def end_pass(self) -> None: ...

    def prepare_arrivals(self, plan: StepPlan, pass_: int, *, survey: bool) -> None:
        """The arrivals are about to run. `survey`: without a backward, so none is left out."""

    def changed_contexts(self, pass_: int) -> bytes:
        """For the backups of the other workers: what the pass changed in the contexts of the local virtual workers."""
        return b""

    def leaving(self, progress: Progress) -> bytes:
        """Data positions at the fence of virtual workers that will leave, as far as they are known and not sent yet."""
        return b""

    def pass_completed(self, changes: Sequence[bytes]) -> None:
        """The pass is complete: apply what it changed in the contexts of all workers."""


class Relocation(NoRelocation):
    """Moves virtual workers to and from this worker."""

    def __init__(
        self,
        generation: CurrentGeneration,
        contexts: ContextSwitch,
        batches: BatchSources,
        gradients: GradientSync,
        backups: ContextBackups,
        *,
        approximate: bool = False,
    ) -> None:
        """`approximate`: what a dead worker had computed in the pass that is running is left out, instead of run again."""
        self._generation, self._contexts, self._batches = generation, contexts, batches
        self._gradients, self._backups = gradients, backups
        self.reducers = ReducerSwitch(generation, gradients)
        self.approximate = approximate
        self.arrivals: Sequence[int] = ()
        self.dropped: Sequence[int] = ()
        self._announced: _Announced | None = None
        self._after_pass: tuple[Placement, WorkerGroup] | None = None

    # Planned, at a fence.

    @property
    def fence_lead(self) -> int:
        return _LEAD if self._batches.looks_ahead else 0

    def announce(self, placement: Placement, worker: int | None, step: int) -> None:
        """From the boundary of `step` on this will be worker `worker` of `placement`; None: it leaves."""
        ranks = () if worker is None else placement.held_by(worker)
        known = self._announced
        if known is None or known.local_ranks != ranks or known.step != step:
            self._announced = _Announced(ranks, step)

    def call_off(self) -> None:
        """No change of the generation is known."""
        self.reducers.discard_prepared()
        if self._announced is not None:
            self._announced = None
            self._batches.call_off()

    def leaving(self, progress: Progress) -> bytes:
        announced = self._announced
        if announced is None:
            return b""
        steps = progress.done + announced.step - progress.step
        known = {}
        for rank in self._generation.local_ranks:
            if rank not in announced.local_ranks and rank not in announced.sent:
                position = self._batches.leave_at(rank, steps)
                if position is not None:
                    known[rank] = position.to_tree()
        announced.sent.update(known)
        return statetree.encode(known) if known else b""

    def expect(self, positions: Mapping[int, Any]) -> None:
        """Virtual workers will stand at these positions at the fence: prepare for those that arrive here."""
        if self._announced is not None:
            for rank, position in positions.items():
                if rank in self._announced.local_ranks:
                    self._batches.expect(rank, position)

    def move(
        self, placement: Placement, group: WorkerGroup, contexts: Sequence[Any], *, done: int = 0
    ) -> None:
        """A new generation is in force. `contexts`: of all virtual workers. `done`: steps of the loop that is running."""
        self._generation.switch(placement, group)
        stay = self._contexts.contexts
        self._contexts.replace(
            {
                rank: stay.get(rank) or Context.from_tree(contexts[rank])
                for rank in self._generation.local_ranks
            }
        )
        self._backups.hold(contexts)
        self.reducers.switch()
        self._announced = None
        self._batches.switch(done)

    # After a death.

    def follow(self, placement: Placement, group: WorkerGroup, *, in_pass: bool) -> None:
        """The survivors go on together. The virtual workers that arrive here have backed-up contexts."""
        before = self._generation.local_ranks
        self._generation.switch(placement, group)
        arrivals = tuple(rank for rank in self._generation.local_ranks if rank not in before)
        present = self._contexts.contexts
        self._contexts.replace(
            {
                rank: self._backups.of(rank) if rank in arrivals else present[rank]
                for rank in self._generation.local_ranks
            }
        )
        self._batches.catch_up(arrivals)
        self._announced = None
        self.reducers.retake(in_pass=in_pass)
        if in_pass:
            self.arrivals = arrivals

    def follow_after_pass(self, placement: Placement, group: WorkerGroup) -> None:
        """The same, once the interrupted pass is complete here: another survivor had completed it."""
        self._after_pass = placement, group

    def begin_pass(self) -> None:
        self.dropped = ()

    def end_pass(self) -> None:
        self.arrivals = ()

    def prepare_arrivals(self, plan: StepPlan, pass_: int, *, survey: bool) -> None:
        self._batches.add_arrivals(plan.first_batch, pass_, plan)
        if survey or not self.approximate:
            return
        for rank in self.arrivals:
            if pass_ == 0:
                self._batches.fetch_and_drop(rank, plan)
            self._gradients.leave_out(rank)
        self.dropped = (*self.dropped, *self.arrivals)
        self.arrivals = ()

    def changed_contexts(self, pass_: int) -> bytes:
        if not self._backups.enabled or self._generation.group.size == 1:
            return b""
        self._batches.save_positions()
        mine = {rank: self._contexts.contexts[rank] for rank in self._generation.local_ranks}
        return encode_changes(self._backups.changes(mine, self._batches.first_pass_streams(pass_)))

    def pass_completed(self, changes: Sequence[bytes]) -> None:
        if self._backups.enabled:
            self._batches.backups_updated()
            for payload in changes:
                if payload:
                    self._backups.take(decode_changes(payload))
        if self._after_pass is not None:
            (placement, group), self._after_pass = self._after_pass, None
            self.follow(placement, group, in_pass=False)

"""The gradients of all tracked modules: taken per virtual worker, reduced over all workers, set to the mean over all N.

One `ModuleGradients` per module with trainable parameters does the work, with a reducer in the order of the job. Modules are
reduced in the order in which they were tracked. `reducer_switch.py` changes the reducers with the generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgspec
from torch import nn

from gyrostat.core.job import ReductionOrder
from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.base import Reducer
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.reduce.ddp import DdpOrder
from gyrostat.engine.reduce.gradients import ModuleGradients, ModuleParticipation
from gyrostat.engine.reduce.tree import TreeOrder
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.transport.group import WorkerGroup

_PARTICIPATIONS = msgspec.msgpack.Decoder(list[ModuleParticipation])


class GradientSync:
    """The gradients of all tracked modules."""

    def __init__(self, generation: CurrentGeneration, order: ReductionOrder = ReductionOrder.DDP) -> None:
        self._generation, self._order = generation, order
        self.modules: list[ModuleGradients] = []
        """Those that have trainable parameters."""

    def add(self, name: str, module: nn.Module, options: DdpOptions) -> bool:
        """A module was tracked. Returns whether it has trainable parameters."""
        gradients = ModuleGradients(name, module, options, overlap=self._generation.group.size > 1)
        if not gradients.parameters:
            return False
        gradients.reduction = self.make_reducer(gradients, self._generation.placement, self._generation.group)
        self.modules.append(gradients)
        return True

    def make_reducer(self, gradients: ModuleGradients, placement: Placement, group: WorkerGroup) -> Reducer:
        if self._order is ReductionOrder.TREE:
            return TreeOrder(gradients.parameters, placement, group)
        return DdpOrder(gradients.parameters, gradients.options, placement, group)

    @cached_property
    def reduced(self) -> frozenset[int]:
        """The identities of all parameters whose gradients are reduced."""
        return frozenset(id(parameter) for gradients in self.modules for parameter in gradients.parameters)

    # One pass.

    def begin_pass(self) -> None:
        for gradients in self.modules:
            gradients.begin_pass()

    def begin_rank(self, rank: int, weight: float | None, *, last_here: bool) -> None:
        """Virtual worker `rank` begins. `weight`: its share of the samples; `last_here`: no other runs here after it."""
        for gradients in self.modules:
            gradients.begin_rank(rank, weight=weight, last_here=last_here)

    def begin_micro_batch(self, *, last: bool) -> None:
        if last:
            for gradients in self.modules:
                gradients.begin_last_micro_batch()

    def before_backward(self, *, first: bool) -> None:
        """`first`: nothing has been accumulated by this virtual worker in this pass."""
        for gradients in self.modules:
            gradients.before_backward(first=first)

    def after_backward(self, *, last: bool) -> None:
        """`last`: the gradients of this virtual worker are complete, and go to the reducers."""
        if last:
            for gradients in self.modules:
                gradients.end_rank()

    def participation(self) -> bytes:
        """What the other workers need to know of this worker's virtual workers before the reduction, per module."""
        return msgspec.msgpack.encode([gradients.part() for gradients in self.modules])

    def send_off(self) -> None:
        """The report is on its way to the other workers: reduce what is complete here."""
        count = len(self._generation.local_ranks)
        for gradients in self.modules:
            gradients.send_off(count)

    def complete(self, participations: Sequence[bytes]) -> None:
        """Wait for the sums. Raises `PeerLost`."""
        workers = decode_participations(tuple(participations))
        virtual_workers = self._generation.placement.virtual_workers
        for number, gradients in enumerate(self.modules):
            gradients.complete([worker[number] for worker in workers], virtual_workers)

    def settle(self, participations: Sequence[bytes]) -> None:
        """The pass is complete: set `.grad` to the mean over all virtual workers."""
        workers = decode_participations(tuple(participations))
        for number, gradients in enumerate(self.modules):
            gradients.settle([worker[number] for worker in workers])

    # Approximate recovery.

    def leave_out(self, rank: int) -> None:
        """Virtual worker `rank` of a dead worker adds nothing to this pass."""
        for gradients in self.modules:
            gradients.leave_out(rank)

    def compensate(self, left_out: int) -> None:
        """The mean over all is that over the others, scaled."""
        ranks = self._generation.placement.virtual_workers
        for gradients in self.modules:
            gradients.scale(ranks / (ranks - left_out))

    # State.

    def layouts(self) -> dict[str, Any]:
        """What decides the order of later reductions, by module."""
        return {gradients.name: gradients.reduction.state_dict() for gradients in self.modules}

    def load_layouts(self, layouts: Mapping[str, Any]) -> None:
        for gradients in self.modules:
            if gradients.name in layouts:
                gradients.reduction.load_state_dict(layouts[gradients.name])


@lru_cache(maxsize=1)  # needed twice in a pass, and mostly the same as in the pass before
def decode_participations(participations: tuple[bytes, ...]) -> list[list[ModuleParticipation]]:
    return [_PARTICIPATIONS.decode(each) for each in participations]

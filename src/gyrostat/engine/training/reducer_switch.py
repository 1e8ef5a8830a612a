"""The reducers of another generation: prepared ahead, switched to at a fence, reused by the survivors of a death.

A generation to come can have its reducers made ahead, so that the memory they need is touched before training waits for it.
Where a worker dies in the middle of a pass, the gradients already handed over are reduced again among the survivors, and a
survivor that missed the sums of a completed pass gets them from one that has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.base import Reducer
from gyrostat.engine.reduce.gradients import ModuleGradients
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.gradient_sync import GradientSync, decode_participations
from gyrostat.engine.training.heap import touch_room_for
from gyrostat.engine.transport.group import WorkerGroup


class ReducerSwitch:
    """Changes the reducers of all tracked modules."""

    def __init__(self, generation: CurrentGeneration, gradients: GradientSync) -> None:
        self._generation, self._gradients = generation, gradients
        self._prepared: tuple[int, list[Reducer]] | None = None  # a generation to come, and its reducers

    def prepare(self, placement: Placement, group: WorkerGroup) -> None:
        """Make the reducers of a generation to come, and touch the memory they need. Called by another thread."""
        made = []
        for gradients in self._gradients.modules:
            reducer = self._gradients.make_reducer(gradients, placement, group)
            reducer.load_state_dict(gradients.reduction.state_dict())
            reducer.warm_up_beside(gradients.reduction)
            made.append(reducer)
        self._prepared = group.generation, made

    def prepare_to_join(self, placement: Placement, group: WorkerGroup, layouts: Mapping[str, Any]) -> None:
        """A newcomer: the same, with the layouts of the job. There are no reducers in use."""
        for gradients in self._gradients.modules:
            gradients.reduction = self._gradients.make_reducer(gradients, placement, group)
            gradients.reduction.load_state_dict(layouts[gradients.name])
            gradients.reduction.warm_up()
        self._prepared = group.generation, [gradients.reduction for gradients in self._gradients.modules]
        touch_room_for(
            parameter for gradients in self._gradients.modules for parameter in gradients.parameters
        )

    def discard_prepared(self) -> None:
        self._prepared = None

    def switch(self) -> None:
        """Another generation is in force: reduce among its workers, in the order as before."""
        placement, group = self._generation.placement, self._generation.group
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == group.generation:
            reducers = prepared[1]
        else:
            reducers = [
                self._gradients.make_reducer(gradients, placement, group)
                for gradients in self._gradients.modules
            ]
        for gradients, reducer in zip(self._gradients.modules, reducers, strict=True):
            before = gradients.reduction
            gradients.overlap(group.size > 1)
            if reducer is not before:  # a newcomer's has been in place since it prepared
                gradients.reduction = reducer
                reducer.load_state_dict(before.state_dict())
                reducer.inherit(before)

    def retake(self, *, in_pass: bool) -> None:
        """A worker is lost: reduce among the survivors. `in_pass`: also what the virtual workers here have handed over."""
        placement, group = self._generation.placement, self._generation.group
        for gradients in self._gradients.modules:
            gradients.overlap(group.size > 1)
            if in_pass:
                gradients.retake(placement, group)
            else:
                gradients.reduction.retake(placement, group)

    def sums(self, participations: Sequence[bytes]) -> list[torch.Tensor]:
        """The sums of the last pass, for a worker that missed it."""
        return [
            flat for gradients in self._touched(participations) for flat in gradients.reduction.last_sum()
        ]

    def room_for_sums(self, participations: Sequence[bytes]) -> list[torch.Tensor]:
        """Where a worker that missed the pass puts them; `settle` uses them."""
        return [
            flat for gradients in self._touched(participations) for flat in gradients.reduction.receive_sum()
        ]

    def _touched(self, participations: Sequence[bytes]) -> list[ModuleGradients]:
        """The modules that were reduced in a pass."""
        workers = decode_participations(tuple(participations))
        return [
            gradients
            for number, gradients in enumerate(self._gradients.modules)
            if any(worker[number].touched > 0 for worker in workers)
        ]

"""The loops a script sees: `job.steps` hands out steps, a step hands out micro-batches.

Both are plain iterators that the script drives. Handing out a step is a boundary: the one instant at which checkpoints
are taken and placements change.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.engine.training.collectives import Collectives
from gyrostat.engine.training.loop_length import LoopLength
from gyrostat.engine.training.mini_batch import MiniBatchRunner
from gyrostat.engine.training.parts import Batches
from gyrostat.engine.training.plan import DataLoop, StepPlan

if TYPE_CHECKING:
    from gyrostat.data.loader import OrderedLoader
    from gyrostat.data.order import EpochOrder
    from gyrostat.engine.script.training_loop import TrainingLoop


class AnyStep(Protocol):
    """What a script may do with a step, whichever loops hand it out."""

    number: int
    passes: int

    def __iter__(self) -> Iterator[Any]: ...

    def survey(self) -> Iterator[Any]: ...

    @property
    def micro_batches(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...

    def backward(self, loss: torch.Tensor, **options: Any) -> None: ...

    @property
    def local(self) -> dict[str, Any]: ...

    @property
    def virtual_rank(self) -> int: ...


class Step:
    """One global mini-batch. Iterate it for this worker's micro-batches; iterate it again for another pass."""

    def __init__(self, training: TrainingLoop, runner: MiniBatchRunner, plan: StepPlan, number: int) -> None:
        self._training, self._runner, self._plan = training, runner, plan
        self._running = self._surveyed = False
        self.number = number
        """Its number within the `job.steps` loop. Unlike a counter of the script, it survives a resume."""
        self.passes = 0
        """Passes completed."""

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(survey=False)

    def _iterate(self, *, survey: bool) -> Iterator[Any]:
        if self._running or self._training.current_step is not self:
            raise Misuse(
                "the inner loop of an earlier step, or one that was left by `break`, cannot be iterated; run every inner "
                "loop to its end"
            )
        self._running = True
        try:
            yield from self._runner.run_pass(self._plan, self._training.progress, survey=survey)
        except GeneratorExit:
            self._runner.broke_off()
            raise
        self._running = False
        self.passes += not survey
        self._training.pass_done()

    def survey(self) -> Iterator[Any]:
        """This worker's micro-batches, before the pass and without gradients: `job.mean`, `job.sum` and `job.gather` in its
        body are values of all virtual workers, readable below the loop and in the pass that follows.

        What the body draws from random streams, and what it does to buffers, is undone. The pass draws from where fetching the
        step's micro-batches left the streams: with one micro-batch per virtual worker, the same numbers again.
        """
        if self.passes or self._surveyed:
            raise Misuse("step.survey comes once in a step, and before its first pass")
        self._surveyed = True
        return self._iterate(survey=True)

    @property
    def micro_batches(self) -> int:
        """Of each virtual worker."""
        return self._plan.micro_batches

    @property
    def micro_batch(self) -> int:
        """The number of the micro-batch that is running, of those of its virtual worker."""
        return self._runner.current("step.micro_batch").number

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute this micro-batch's gradients. When the inner loop has ended, `.grad` holds the mean over all N."""
        self._runner.backward(loss, **options)

    @property
    def local(self) -> dict[str, Any]:
        """A dict of the virtual worker whose micro-batch is running. It moves with it."""
        return self._runner.local()

    @property
    def virtual_rank(self) -> int:
        """The virtual worker whose micro-batch is running."""
        return self._runner.current("step.virtual_rank").rank

    @property
    def broken_off(self) -> bool:
        """An inner loop began and did not end."""
        return self._running

    def require_complete(self) -> None:
        """Raise `Misuse` if the step's inner loop was not run to its end."""
        if self._running:
            raise Misuse(
                f"the inner loop of step {self._training.progress.step} was left before all virtual workers had run (a "
                "`break`?); `break` belongs into the outer loop, after the update"
            )
        if self.passes == 0:
            raise Misuse(
                f"step {self._training.progress.step} was not iterated: write `for … in step:` and call "
                "step.backward(loss) in it"
            )


@dataclass(frozen=True, kw_only=True)
class LoopData:
    """What a loop over steps needs of the engine."""

    runner: MiniBatchRunner
    batches: Batches
    length: LoopLength
    collectives: Collectives


class StepLoop:
    """One `job.steps` loop."""

    def __init__(
        self,
        training: TrainingLoop,
        data: LoopData,
        loader: OrderedLoader,
        order: EpochOrder | None,
        accumulate: int,
        limit: int | None,
    ) -> None:
        self._training, self._data, self._loader, self._order = training, data, loader, order
        self._accumulate, self._limit = accumulate, limit
        self._count = data.length.of(loader, order, training.progress)
        """Micro-batches of each virtual worker; None if that is not known beforehand."""
        if self._count is None and accumulate > 1 and loader.num_workers == 0:
            raise UsageError(
                f"accumulate={accumulate} needs to know when data ends: give the sampler a __len__, or num_workers > 0"
            )

    def run(self, done: int) -> Generator[Step, None, None]:
        """Hand out the steps from number `done` on."""
        loop = DataLoop(
            loader=self._loader,
            order=self._order,
            epoch=self._training.epoch,
            accumulate=self._accumulate,
            first_batch=done * self._accumulate,
            batches=self._count,
        )
        self._data.batches.begin_loop(loop)
        total = None if self._count is None else -(-self._count // self._accumulate)
        try:
            while (self._limit is None or done < self._limit) and (total is None or done < total):
                self._training.boundary()
                plan = self._plan(done)
                if plan is None:
                    total = done
                    break
                step = Step(self._training, self._data.runner, plan, done)
                self._training.begin_step(step, samples=self._samples(plan))
                try:
                    yield step
                except GeneratorExit:
                    self._training.leave_step(step, broke=True)
                    raise
                self._training.leave_step(step, broke=False)
                done += 1
        finally:
            self._data.batches.end_loop(used_up=done == total and (self._limit is None or done < self._limit))

    def _plan(self, done: int) -> StepPlan | None:
        """What the next step consists of; None if there is no data for it."""
        first = done * self._accumulate
        count = self._available() if self._count is None else min(self._accumulate, self._count - first)
        if count == 0:
            return None
        return StepPlan(loader=self._loader, order=self._order, first_batch=first, micro_batches=count)

    def _available(self) -> int:
        """How many of the step's micro-batches every virtual worker of the job has. All workers ask together."""
        batches, progress = self._data.batches, self._training.progress
        batches.forget_available()
        return self._data.collectives.minimum(
            "data", progress, lambda: batches.available(self._accumulate, progress.done)
        )

    def _samples(self, plan: StepPlan) -> int | None:
        """None: known when the micro-batches have been fetched."""
        if self._order is None:
            return None
        batches = range(plan.first_batch, plan.first_batch + plan.micro_batches)
        return sum(self._order.samples(batch) for batch in batches)

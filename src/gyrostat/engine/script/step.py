"""The loops a script sees: `job.steps` hands out steps, a step hands out micro-batches.

Both are plain iterators that the script drives. Handing out a step is a boundary: the one instant at which checkpoints
are taken and, later, placements change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.engine.training.runner import DataLoop, Runner, StepPlan

if TYPE_CHECKING:
    from gyrostat.data.loader import OrderedLoader
    from gyrostat.data.order import EpochOrder
    from gyrostat.engine.script.job import Job


class Step:
    """One global mini-batch. Iterate it for this worker's micro-batches; iterate it again for another pass."""

    def __init__(self, job: Job, runner: Runner, plan: StepPlan, number: int) -> None:
        self._job, self._runner, self._plan = job, runner, plan
        self._running = False
        self.number = number
        """Its number within the `job.steps` loop. Unlike a counter of the script, it survives a resume."""
        self.passes = 0
        """Passes completed."""

    def __iter__(self) -> Iterator[Any]:
        if self._running or self._job.current_step is not self:
            raise Misuse(
                "the inner loop of an earlier step, or one that was left by `break`, cannot be iterated; run every inner "
                "loop to its end"
            )
        self._running = True
        try:
            yield from self._runner.run_pass(self._plan, self._job.progress)
        except GeneratorExit:
            self._runner.micro_batch = None
            raise
        self._running = False
        self.passes += 1
        self._job.pass_done()

    @property
    def micro_batches(self) -> int:
        """Of each virtual worker."""
        return self._plan.micro_batches

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute this micro-batch's gradients. When the inner loop has ended, `.grad` holds the mean over all N."""
        self._runner.backward(loss, **options)

    @property
    def local(self) -> dict[str, Any]:
        """A dict of the virtual worker whose micro-batch is running. It moves with it."""
        return self._runner.local(self._runner.current("step.local").rank)

    @property
    def virtual_rank(self) -> int:
        """The virtual worker whose micro-batch is running."""
        return self._runner.current("step.virtual_rank").rank

    @property
    def broken_off(self) -> bool:
        """An inner loop began and did not end."""
        return self._running

    def require_complete(self) -> None:
        """Complain if the step's inner loop was not run to its end."""
        if self._running:
            raise Misuse(
                f"the inner loop of step {self._job.step} was left before all virtual workers had run (a `break`?); "
                "`break` belongs into the outer loop, after the update"
            )
        if self.passes == 0:
            raise Misuse(
                f"step {self._job.step} was not iterated: write `for … in step:` and call step.backward(loss) in it"
            )


class StepLoop:
    """One `job.steps` loop."""

    def __init__(
        self,
        job: Job,
        runner: Runner,
        loader: OrderedLoader,
        order: EpochOrder | None,
        accumulate: int,
        limit: int | None,
    ) -> None:
        self._job, self._runner, self._loader, self._order = job, runner, loader, order
        self._accumulate, self._limit = accumulate, limit
        self._batches = runner.batches(loader, order, job.progress)
        if self._batches is None and accumulate > 1 and loader.num_workers == 0:
            raise UsageError(
                f"accumulate={accumulate} needs to know when data ends: give the sampler a __len__, or num_workers > 0"
            )

    def run(self, done: int) -> Iterator[Step]:
        """Hand out the steps from number `done` on."""
        loop = DataLoop(
            loader=self._loader,
            order=self._order,
            epoch=self._job.epoch,
            accumulate=self._accumulate,
            first_batch=done * self._accumulate,
        )
        self._runner.begin_loop(loop)
        total = None if self._batches is None else -(-self._batches // self._accumulate)
        try:
            while (self._limit is None or done < self._limit) and (total is None or done < total):
                self._job.boundary()
                plan = self._plan(done)
                if plan is None:
                    total = done
                    break
                step = Step(self._job, self._runner, plan, done)
                self._job.begin_step(step, samples=self._samples(plan))
                try:
                    yield step
                except GeneratorExit:
                    self._job.leave_step(step, broke=True)
                    raise
                self._job.leave_step(step, broke=False)
                done += 1
        finally:
            self._runner.end_loop(used_up=done == total and (self._limit is None or done < self._limit))

    def _plan(self, done: int) -> StepPlan | None:
        """What the next step consists of; None if there is no data for it."""
        first = done * self._accumulate
        if self._batches is None:
            count = self._runner.available(self._accumulate, self._job.progress)
        else:
            count = min(self._accumulate, self._batches - first)
        if count == 0:
            return None
        return StepPlan(loader=self._loader, order=self._order, first_batch=first, micro_batches=count)

    def _samples(self, plan: StepPlan) -> int | None:
        """None: known when the micro-batches have been fetched."""
        if self._order is None:
            return None
        batches = range(plan.first_batch, plan.first_batch + plan.micro_batches)
        return sum(self._order.samples(batch) for batch in batches)

"""For loops of the user: `for batch in loader: …; backward(loss); optimizer.step()`.

Such a loop runs once per micro-batch of this worker's virtual workers, and its update must happen once per step. After each
backward the following micro-batch is fetched; if there is none, the pass is complete, gradients are the mean over all N, and
the update that comes next counts. Before that it does nothing, as in an accumulation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from gyrostat.core.errors import Misuse
from gyrostat.data.loader import OrderedLoader
from gyrostat.engine.script.job import Job
from gyrostat.engine.script.step import AnyStep

_NONE = object()


class Feed:
    """The steps of the job, micro-batch by micro-batch."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._epochs: Iterator[int] | None = None
        self._epoch = -1
        self._iterations = 0
        self._step: AnyStep | None = None
        self._micro: Iterator[Any] = iter(())
        self._following: Any = _NONE
        self.complete = True
        """All backwards of the step have run: gradients are the mean over all N."""

    @property
    def in_step(self) -> bool:
        """A step has begun, and not all its backwards have run."""
        return not self.complete

    def batches(self, loader: OrderedLoader, accumulate: int) -> Iterator[tuple[Any, int]]:
        """The micro-batches of the next epoch, each with its number in its virtual worker's accumulation.

        A script that resumes comes by epochs that are done: they have none.
        """
        if self._epochs is None:
            self._epochs = self._job.epochs(sys.maxsize)
        wanted, self._iterations = self._iterations, self._iterations + 1
        while self._epoch < wanted:
            self._epoch = next(self._epochs)
        if self._epoch > wanted:
            return
        for step in self._job.steps(loader, accumulate=accumulate):
            self._step, self._micro, number = step, iter(step), 0
            self._following = next(self._micro)
            while self._following is not _NONE:
                batch, self._following = self._following, None
                self.complete = False
                yield batch, number % step.micro_batches
                if self._following is None:
                    raise Misuse("a batch was not followed by a backward; call it once for every batch")
                number += 1
        self._step = None

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """The backward of the batch that was handed out last."""
        if self._step is None or self._following is not None:
            raise Misuse("backward outside the loop over the training loader, or twice for one batch")
        self._step.backward(loss, **options)
        self._following = next(self._micro, _NONE)
        self.complete = self._following is _NONE

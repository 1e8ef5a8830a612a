"""`ServerStep`: one batch of a job with servers, with the surface of every other step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gyrostat.core.errors import Misuse
from gyrostat.engine.training.mean import Mean, MeanKind


class ServerStep:
    """One batch. Iterate it once; its gradients are pushed when the inner loop has ended."""

    def __init__(self, content: Any, *, number: int, virtual_rank: int, computed: Callable[[], None]) -> None:
        """`computed`: called when the inner loop has ended."""
        self._content, self._computed = content, computed
        self.number = number
        """The number of the batch in its epoch."""
        self.virtual_rank = virtual_rank
        self.micro_batches = 1
        self.micro_batch = 0
        self.passes = 0
        self.loss: float | None = None
        self._running = False
        self._means: list[tuple[Mean, torch.Tensor]] = []

    def __iter__(self) -> Iterator[Any]:
        if self._running or self.passes:
            raise Misuse(
                f"batch {self.number} was iterated twice, or its inner loop was left by `break`; with servers a batch is one "
                "update: run its inner loop once, to the end"
            )
        self._running = True
        yield self._content
        if self.loss is None:
            raise Misuse(f"batch {self.number} was iterated without step.backward(loss)")
        self._running = False
        self.passes = 1
        self._computed()
        for mean, value in self._means:
            mean.set(value)

    def survey(self) -> Iterator[Any]:
        raise Misuse(
            "step.survey in a job with servers: its workers have no step in common, so no values of all of them"
        )

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute gradients. They are pushed when the inner loop has ended; until then they may be clipped."""
        if not self._running:
            raise Misuse("step.backward outside the inner loop: write `for … in step:` and call it there")
        loss.backward(**options)  # type: ignore[no-untyped-call]
        self.loss = float(loss.detach())

    def mean(self, value: torch.Tensor | float, kind: MeanKind) -> Mean:
        """`job.mean`, `job.sum`, `job.gather`: workers have no step in common, so it is this batch's value."""
        if not self._running:
            raise Misuse(f"job.{kind.value} outside the inner loop")
        mean = Mean(kind)
        tensor = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
        if kind is MeanKind.GATHER:
            tensor = tensor[None, None]
        self._means.append((mean, tensor))
        return mean

    @property
    def local(self) -> dict[str, Any]:
        raise Misuse(
            "step.local: workers of a job with servers keep nothing between batches, so that they can come and go"
        )

    def require_complete(self) -> None:
        """Raise `Misuse` if the inner loop was not run to its end."""
        if not self.passes:
            raise Misuse(
                f"batch {self.number} was not iterated to its end: write `for … in step:` and call step.backward(loss) in it"
            )

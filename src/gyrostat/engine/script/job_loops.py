"""`JobLoops`: what `Job` forwards a script's calls to.

`TrainingLoop` is that of N virtual workers. A job with parameter servers has another, in the package `ps` above this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from gyrostat.data.loader import OrderedLoader
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.script.between_steps import BetweenSteps
from gyrostat.engine.script.step import AnyStep
from gyrostat.engine.script.tracked import Tracked
from gyrostat.engine.training.mean import Mean, MeanKind


class JobLoops(Protocol):
    """One method per call of a script. `Job` has their meaning, and has checked plain arguments."""

    @property
    def step(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def is_main(self) -> bool: ...

    @property
    def tracked(self) -> Tracked: ...

    @property
    def is_behind(self) -> bool: ...

    @property
    def between_steps(self) -> BetweenSteps: ...

    def shards(
        self, dataset: Any, batch_size: Any, name: str, others: dict[str, Any], **options: Any
    ) -> OrderedLoader: ...

    def track(self, things: dict[str, Any], options: DdpOptions, *, same_streams: bool = False) -> None: ...

    def epochs(self, count: int) -> Iterator[int]: ...

    def steps(self, loader: OrderedLoader, accumulate: int, limit: int | None) -> Iterator[AnyStep]: ...

    def mean(self, value: torch.Tensor | float, kind: MeanKind = MeanKind.MEAN) -> Mean: ...

    def evaluate(self, loader: OrderedLoader, fn: Callable[[Any], Any]) -> list[Any]: ...

    def log(self, metrics: dict[str, float]) -> None: ...

    def save(self) -> None: ...

    def hand_over(self) -> None:
        """Other loops take the place of these. Raises if these have begun."""

    def finish(self, exit: SystemExit | None = None) -> None:
        """The script has ended, maybe by an `exit` of its own."""

"""`Job`: what a training script may call. `training_loop.py` does the work, or other loops (`job_loops.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from gyrostat.core.errors import UsageError
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.order import Shuffle
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.script.between_steps import BetweenSteps
from gyrostat.engine.script.job_loops import JobLoops
from gyrostat.engine.script.loaders import Loaders
from gyrostat.engine.script.step import AnyStep
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.mean import Mean, MeanKind


class Job:
    """This process's part of a training job."""

    def __init__(
        self,
        loops: JobLoops,
        *,
        generation: CurrentGeneration,
        loaders: Loaders,
        device: torch.device,
        seed: int,
    ) -> None:
        self.device, self.seed = device, seed
        self._loops, self._generation, self._loaders = loops, generation, loaders

    # Where the job is.

    @property
    def virtual_workers(self) -> int:
        """N, the number of virtual workers."""
        return self._generation.placement.virtual_workers

    @property
    def is_main(self) -> bool:
        """True on the worker that runs virtual worker 0."""
        return self._loops.is_main

    @property
    def step(self) -> int:
        """The number of steps completed before the one that is running."""
        return self._loops.step

    @property
    def epoch(self) -> int:
        """The epoch that is running; 0 outside `job.epochs`."""
        return self._loops.epoch

    @property
    def state(self) -> dict[str, Any]:
        """Shared values of the script: equal on all workers, saved in checkpoints."""
        return self._loops.tracked.state

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        self._loops.tracked.set_state(values)

    @property
    def tracked(self) -> dict[str, Any]:
        """The tracked objects, by name."""
        return self._loops.tracked.objects

    @property
    def resuming(self) -> bool:
        """The script repeats what the job has done before: it has not joined, or not reached the place where it resumes."""
        return self._loops.is_behind

    @property
    def between_steps(self) -> BetweenSteps:
        """What all workers, or all virtual workers, do together outside of a step: for integrations of other frameworks."""
        return self._loops.between_steps

    # Setting up.

    def dataloader(
        self,
        dataset: Dataset[Any] | Callable[[int], Dataset[Any]],
        batch_size: int | Sequence[int] | None = 1,
        shuffle: Shuffle = False,
        *,
        num_workers: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **others: Any,
    ) -> OrderedLoader:
        """Like `DataLoader` with a `DistributedSampler` over the N virtual workers; `batch_size` is per virtual worker.

        A list gives each virtual worker a size of its own. Then every sample is seen exactly once per epoch, without padding,
        and gradients are averaged by weight. `shuffle="bijection"` computes the order instead of storing it, for datasets
        of which 8 bytes per sample are too much.

        All other options are DataLoader's, with the meaning they have on every rank; `dataset`, `sampler` and `batch_sampler`
        may be callables that make those of a virtual rank. `num_workers` data workers serve all virtual workers of a worker.
        """
        return self._loaders.dataloader(
            dataset,
            batch_size,
            others,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=drop_last,
            pad=pad,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
        )

    def shards(
        self,
        dataset: Dataset[Any],
        batch_size: int | Sequence[int] = 1,
        *,
        shard_size: int,
        shuffle: bool = True,
        num_workers: int = 0,
        drop_last: bool = False,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str = "shards",
        **others: Any,
    ) -> OrderedLoader:
        """A loader whose virtual workers pull shards of `shard_size` samples when they need one; every sample exactly once.

        Its queues are tracked under `name`, and saved and restored with everything else that is tracked. All other options are
        those of `job.dataloader`.
        """
        return self._loops.shards(
            dataset,
            batch_size,
            name,
            others,
            shard_size=shard_size,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=drop_last,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
        )

    def track(self, *, ddp: dict[str, Any] | None = None, same_streams: bool = False, **things: Any) -> None:
        """Hand over what the job must keep: modules, optimizers, schedulers, scalers. `ddp`: options as for DDP.

        The first call starts the random streams of the virtual workers: virtual worker r's as if seeded with seed + r or, with
        `same_streams`, everyone's as the script's are now, as in DDP scripts that seed all ranks alike.
        """
        self._loops.track(things, DdpOptions.parse(ddp or {}), same_streams=same_streams)

    # The loops.

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs 0 … count-1, less those that a resumed job has behind it."""
        if not isinstance(count, int) or count < 0:
            raise UsageError(f"job.epochs needs a whole number of epochs, got {count!r}")
        return self._loops.epochs(count)

    def steps(
        self, loader: OrderedLoader, accumulate: int = 1, limit: int | None = None
    ) -> Iterator[AnyStep]:
        """The steps of one epoch over `loader`; at most `limit`; `accumulate` micro-batches each per virtual worker."""
        if not isinstance(loader, OrderedLoader):
            raise UsageError(
                f"job.steps needs a loader made by job.dataloader, got a {type(loader).__name__}"
            )
        if not isinstance(accumulate, int) or accumulate < 1:
            raise UsageError(f"accumulate must be a whole number of at least 1, got {accumulate!r}")
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise UsageError(f"limit must be a whole number of at least 0, or None, got {limit!r}")
        if accumulate > 1 and loader.sizes is not None:
            raise UsageError("accumulate needs equal batch sizes; this loader has shards, or a list of them")
        return self._loops.steps(loader, accumulate, limit)

    # During and after an epoch.

    def mean(self, value: torch.Tensor | float) -> Mean:
        """In a micro-batch: a handle to the mean of `value` over all N, readable after the inner loop."""
        return self._loops.mean(value)

    def sum(self, value: torch.Tensor | float) -> Mean:
        """In a micro-batch: a handle to the sum of `value` over all micro-batches of all N, readable after the inner loop."""
        return self._loops.mean(value, MeanKind.SUM)

    def gather(self, value: torch.Tensor | float) -> Mean:
        """In a micro-batch: a handle to the values of all, shaped (N, micro-batches, …), readable after the inner loop."""
        return self._loops.mean(value, MeanKind.GATHER)

    def evaluate(self, loader: OrderedLoader, fn: Callable[[Any], Any]) -> list[Any]:
        """fn(micro-batch) for every micro-batch of the loader's dataset, in dataset order, on every worker.

        The virtual workers share the work; each sample is seen once. Runs without gradients, with tracked modules in
        eval mode, on random streams of its own; modes, buffers and streams are restored afterwards.
        """
        if not isinstance(loader, OrderedLoader):
            raise UsageError(
                f"job.evaluate needs a loader made by job.dataloader, got a {type(loader).__name__}"
            )
        return self._loops.evaluate(loader, fn)

    def log(self, **metrics: float) -> None:
        """Report numbers of the script: shown live by `gyrostat run`, and part of its report."""
        self._loops.log(metrics)

    def save(self) -> None:
        """Checkpoint at the next boundary. Call it on all workers."""
        self._loops.save()

    def __repr__(self) -> str:
        return f"Job(virtual_workers={self.virtual_workers}, step={self.step})"

    # Of gyrostat itself.

    @property
    def loops(self) -> JobLoops:
        """What this job's calls are forwarded to."""
        return self._loops

    def replace_loops(self, loops: JobLoops) -> None:
        """Before training begins: other loops take the place of these."""
        self._loops.hand_over()
        self._loops = loops

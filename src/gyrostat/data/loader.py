"""The ordered loader: the micro-batches of every virtual worker, equal to those of the DataLoader of its rank.

`job.dataloader(…)` makes one. It is a description, without position and random state: `order.py` or a sampler
(`indices.py`) decides the samples, a virtual worker's place is a `Position` (`position.py`), and a `BatchSource` makes the
batches (`batch_source.py`, `shared_source.py`). `options.py` checks the user's options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, SequentialSampler, default_collate

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.data import torch_internals
from gyrostat.data.indices import EndlessIndices, Indices, OrderIndices
from gyrostat.data.order import EpochOrder, EvenOrder, Shuffle, UnevenOrder
from gyrostat.data.stream import every_nth
from gyrostat.data.virtual_data_worker import BatchRecipe, RankedInit


@dataclass(frozen=True, kw_only=True)
class OrderedLoader:
    """A dataset and how it is cut into micro-batches: one field per option. `batch_size` is per virtual worker."""

    dataset: Dataset[Any] | Callable[[int], Dataset[Any]]
    """A dataset, or a function that makes the dataset of a virtual rank."""
    batch_size: int | None
    """None: the dataset returns a whole micro-batch for one index."""
    number: int = 0
    """The loader's number in the script; positions are stored under it."""
    sizes: tuple[int, ...] | None = None
    """A size for each virtual worker, if they differ; then `batch_size` is the largest, and evaluation uses it."""
    virtual_workers: int = 1
    per_rank: bool = False
    """Whether `dataset` makes the dataset of a rank."""
    iterable: bool = False
    shuffle: Shuffle = False
    drop_last: bool = False
    pad: bool = True
    sampler: Any = None
    """The user's: an iterable of which every virtual worker gets a copy, or a function that makes that of a virtual rank."""
    batch_sampler: Any = None
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = False
    lookahead: bool = False
    """Whether a batch is made before the one that precedes it is trained, as Accelerate's loaders do without data workers."""
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | RankedInit | None = None
    generator: torch.Generator | None = None
    generator_owner: int = 0
    """The number of the script's first loader with this generator: the generator's state is stored there."""
    context: Any = None
    """The multiprocessing context that starts data workers; None: fork."""
    pin_memory: bool = False
    collate_fn: Callable[[list[Any]], Any] = field(default=default_collate)
    _datasets: dict[int, Any] = field(default_factory=dict, repr=False)
    _samplers: dict[int, Any] = field(default_factory=dict, repr=False)

    @property
    def leaves_traces(self) -> bool:
        """Whether a position in it has more than the number of micro-batches consumed."""
        return self.num_workers > 0 or not self.ordered or self.generator is not None or self.lookahead

    @property
    def remembers_loops(self) -> bool:
        """Whether the next loop over it depends on the state that the last one left."""
        return self.iterable or self.has_sampler or self.generator is not None or self.persistent_workers

    def __iter__(self) -> NoReturn:
        raise Misuse(
            "a loader of job.dataloader is not iterated itself: train with `for step in job.steps(loader)` and `for batch in "
            "step`, and evaluate with job.evaluate(loader, fn), which also works on one worker"
        )

    # Length and order.

    @property
    def length(self) -> int:
        """Samples in the dataset."""
        require_length(self.dataset, "the job's own order")
        return len(cast(Sized, self.dataset))

    @property
    def ordered(self) -> bool:
        """Whether samples are in the job's own order."""
        return not self.iterable and not self.has_sampler

    @property
    def has_sampler(self) -> bool:
        """Whether every rank has a sampler: the user's, or DataLoader's own if the dataset is made per rank."""
        given = self.sampler is not None or self.batch_sampler is not None
        return given or (self.per_rank and not self.iterable)

    def __len__(self) -> int:
        """Micro-batches per virtual worker and epoch, as `len(DataLoader)` is per rank."""
        if self.ordered:
            return self._order(seed=0, epoch=0).batches
        if self.has_sampler:
            return len(self.batched(self.sampler_of(0)))
        raise TypeError("a loader over an iterable dataset has no length")

    def order(self, *, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch; an error if it leaves a virtual worker without data."""
        order = self._order(seed=seed, epoch=epoch)
        if order.batches == 0:
            raise Misuse(
                f"virtual workers are left without data: {self.length} samples among {self.virtual_workers} of them make no "
                f"micro-batch of {self.sizes or self.batch_size} each (drop_last={self.drop_last}, pad={self.pad}); use a "
                "smaller batch_size, fewer virtual workers or more data"
            )
        return order

    def _order(self, *, seed: int, epoch: int) -> EpochOrder:
        if self.sizes is not None:
            return UnevenOrder(
                length=self.length,
                sizes=self.sizes,
                seed=seed,
                epoch=epoch,
                shuffle=self.shuffle,
                drop_last=self.drop_last,
            )
        return EvenOrder(
            length=self.length,
            virtual_workers=self.virtual_workers,
            batch_size=self.batch_size or 1,
            seed=seed,
            epoch=epoch,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            pad=self.pad,
        )

    # Datasets and samplers of virtual workers.

    def dataset_of(self, rank: int) -> Any:
        """The dataset of the rank's DataLoader. An iterable dataset for all ranks is divided among them."""
        if rank not in self._datasets:
            if self.per_rank:
                self._datasets[rank] = cast(Callable[[int], Any], self.dataset)(rank)
            elif self.iterable and self.virtual_workers > 1:
                self._datasets[rank] = every_nth(self.dataset, rank, self.virtual_workers)
            else:
                self._datasets[rank] = self.dataset
        return self._datasets[rank]

    def sampler_of(self, rank: int) -> Any:
        """The rank's sampler, or batch sampler. If one object is given for all, it is copied before it is iterated."""
        given = self.sampler if self.batch_sampler is None else self.batch_sampler
        if isinstance(given, Iterable):
            return given
        if rank not in self._samplers:
            self._samplers[rank] = self._own_sampler(rank) if given is None else given(rank)
        return self._samplers[rank]

    def _own_sampler(self, rank: int) -> Any:
        """The sampler that DataLoader makes over a dataset which is the rank's alone: all of it, not every N-th sample."""
        dataset = self.dataset_of(rank)
        require_length(dataset, "DataLoader")
        return (
            RandomSampler(dataset, generator=self.generator) if self.shuffle else SequentialSampler(dataset)
        )

    def batched(self, sampler: Any) -> Any:
        """The iterable of indices that a DataLoader makes of this sampler."""
        if self.batch_sampler is not None or self.batch_size is None:
            return sampler
        return BatchSampler(sampler, self.batch_size, self.drop_last)

    def indices(self, order: EpochOrder | None, rank: int, first: int) -> Indices:
        """The indices for the rank's dataset, without a sampler."""
        if order is None:
            return EndlessIndices(self._every)
        return OrderIndices(order, rank, first, single=self.batch_size is None)

    @property
    def _every(self) -> Any:
        return None if self.batch_size is None else [None] * self.batch_size

    # Making batches.

    @property
    def auto_collation(self) -> bool:
        return self.batch_size is not None or self.batch_sampler is not None

    @property
    def pins(self) -> bool:
        return self.pin_memory and torch.accelerator.is_available()

    def recipe(self, ranks: Sequence[int]) -> BatchRecipe:
        own = self.per_rank or (self.iterable and self.virtual_workers > 1)
        datasets: dict[int | None, Any] = {rank: self.dataset_of(rank) for rank in ranks} if own else {}
        return BatchRecipe(
            datasets=datasets if own else {None: self.dataset},
            iterable=self.iterable,
            auto_collation=self.auto_collation,
            collate_fn=self.collate_fn,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
            every=self._every,
        )

    def fetch(self, indices: list[int]) -> Any:
        """One micro-batch of these samples. The dataset draws from the streams in force."""
        fetcher = torch_internals.make_fetcher(
            self.dataset,
            iterable=False,
            auto_collation=self.auto_collation,
            collate_fn=self.collate_fn,
            drop_last=self.drop_last,
        )
        batch = fetcher.fetch(indices if self.auto_collation else indices[0])
        return torch_internals.pinned(batch) if self.pins else batch


def require_length(dataset: Any, whose: str) -> None:
    """Raise if the number of samples is not known, which `whose` order needs."""
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} has no __len__, which {whose} needs: give it one, give a sampler, or make it an "
            "IterableDataset"
        )

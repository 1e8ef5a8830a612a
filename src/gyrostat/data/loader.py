"""The ordered loader: micro-batches of a map-style dataset for any virtual worker, as its DataLoader would give them.

`job.dataloader(…)` makes one. It holds no position and no random state: the engine says which virtual worker's
streams are in force and which micro-batch it wants. Which samples those are is decided in `order.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from gyrostat.core.errors import Misuse, NotYet, UsageError
from gyrostat.data.order import EpochOrder, Order, Shuffle, UnevenOrder

# What torch's DataLoader takes besides, and the one value that means "as if not given".
_LATER = {
    "sampler": None,
    "batch_sampler": None,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "in_order": True,
}


@dataclass(frozen=True, kw_only=True)
class OrderedLoader:
    """A dataset and how it is cut into micro-batches. `batch_size` is per virtual worker."""

    dataset: Dataset[Any]
    batch_size: int
    sizes: tuple[int, ...] | None = None
    """A size for each virtual worker, if they differ; then `batch_size` is the largest, and evaluation uses it."""
    virtual_workers: int = 1
    shuffle: Shuffle = False
    drop_last: bool = False
    pad: bool = True
    pin_memory: bool = False
    collate_fn: Callable[[list[Any]], Any] = field(default=default_collate)

    @property
    def length(self) -> int:
        return len(cast(Sized, self.dataset))

    def __len__(self) -> int:
        """Micro-batches per virtual worker and epoch, as `len(DataLoader)` is per rank."""
        return self._order(seed=0, epoch=0).batches

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
        return Order(
            length=self.length,
            virtual_workers=self.virtual_workers,
            batch_size=self.batch_size,
            seed=seed,
            epoch=epoch,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            pad=self.pad,
        )

    def draw_base_seed(self) -> None:
        """What `iter(DataLoader)` draws from the stream in force. Without data workers nobody uses the number."""
        torch.empty((), dtype=torch.int64).random_()

    def fetch(self, indices: list[int]) -> Any:
        """One micro-batch, collated. Whatever the dataset draws comes from the streams in force."""
        getitems = getattr(self.dataset, "__getitems__", None)
        samples = getitems(indices) if getitems is not None else [self.dataset[index] for index in indices]
        batch = self.collate_fn(samples)
        return _pinned(batch) if self.pin_memory and torch.cuda.is_available() else batch


def make_loader(
    dataset: Dataset[Any],
    *,
    batch_size: Any,
    virtual_workers: int,
    shuffle: Shuffle,
    num_workers: int,
    drop_last: bool,
    pad: bool,
    pin_memory: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    others: dict[str, Any],
) -> OrderedLoader:
    """Check what the user gave and make the loader. Options of DataLoader that mean nothing special are accepted."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise NotYet(
            f"{type(dataset).__name__} has no length and no index; this version needs a map-style dataset "
            "(__len__ and __getitem__)"
        )
    if not isinstance(shuffle, bool) and shuffle != "bijection":
        raise UsageError(
            f'shuffle={shuffle!r}: give True (DistributedSampler\'s order), "bijection" (one that needs no memory) or False'
        )
    sizes = tuple(batch_size) if isinstance(batch_size, (list, tuple)) else None
    if sizes is not None and len(sizes) != virtual_workers:
        raise UsageError(
            f"batch_size={list(sizes)} has {len(sizes)} entries, but the job has {virtual_workers} virtual workers; give one "
            "size for each, or one number for all"
        )
    for size in (batch_size,) if sizes is None else sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(
                f"batch_size must be a whole number of at least 1 per virtual worker, got {batch_size!r}"
            )
    if num_workers != 0:
        raise NotYet(f"num_workers={num_workers} is not in this version; use num_workers=0")
    for name, value in others.items():
        if name not in _LATER:
            raise UsageError(f"job.dataloader has no option {name!r}")
        if value != _LATER[name]:
            raise NotYet(f"{name}={value!r} is not in this version; leave it out")
    return OrderedLoader(
        dataset=dataset,
        batch_size=batch_size if sizes is None else max(sizes),
        sizes=sizes,
        virtual_workers=virtual_workers,
        shuffle=shuffle,
        drop_last=drop_last,
        pad=pad,
        pin_memory=pin_memory,
        collate_fn=collate_fn or default_collate,
    )


def _pinned(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, (list, tuple)):
        return type(batch)(_pinned(item) for item in batch)
    if isinstance(batch, dict):
        return {key: _pinned(value) for key, value in batch.items()}
    return batch

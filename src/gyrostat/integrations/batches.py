"""What becomes of a framework's DataLoader on virtual workers, for training and for evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gyrostat.data.loader import OrderedLoader
from gyrostat.data.options import make_loader
from gyrostat.engine.script.job import Job


def loader_options(loader: Any, worker_init_fn: Any) -> dict[str, Any]:
    """The options of `job.dataloader` that a DataLoader has beside dataset, batches and order."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
        "in_order": getattr(loader, "in_order", True),
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    return options


class BatchesOf:
    """A dataset whose sample j is the j-th batch of an evaluation."""

    def __init__(self, loader: Any, batches: Sequence[Sequence[int]]) -> None:
        self._dataset, self._collate, self.batches = loader.dataset, loader.collate_fn, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        indices, fetch = list(self.batches[number]), getattr(self._dataset, "__getitems__", None)
        return number, self._collate(fetch(indices) if fetch else [self._dataset[index] for index in indices])


def draw_base_seed(job: Job, loader: Any) -> None:
    """What `iter(DataLoader)` draws on every rank when an evaluation begins."""
    if loader.generator is None and not (loader.persistent_workers and loader.num_workers):
        job.between_steps.in_every_stream(lambda: torch.empty((), dtype=torch.int64).random_())


def _as_it_is(batch: Any) -> Any:
    return batch


def in_turn(of_rank: Sequence[Sequence[Any]]) -> list[Any]:
    """The first batch of every rank, then the second of every rank, and so on."""
    steps = max(len(batches) for batches in of_rank)
    return [batches[step] for step in range(steps) for batches in of_rank if step < len(batches)]


def evaluation_of(job: Job, loader: Any, batches: Sequence[Sequence[int]]) -> OrderedLoader:
    """A loader for `job.evaluate` with these batches of the loader's dataset. Its micro-batches are (number, batch)."""
    return make_loader(
        BatchesOf(loader, batches),
        batch_size=None,
        virtual_workers=job.virtual_workers,
        shuffle=False,
        num_workers=loader.num_workers,
        drop_last=False,
        pad=False,
        pin_memory=False,
        collate_fn=_as_it_is,
        others={
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        },
    )

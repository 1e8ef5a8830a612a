"""What Accelerate is told of the job, and what its data loaders become on virtual workers.

Accelerate sees a world of N processes of which this is one, but no process group: models stay unwrapped and its collectives do
nothing. Its main process is the worker that runs virtual worker 0. The DataLoader that it prepares for one of N processes
says which batches every virtual worker gets: `rank_batches`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import IterableDataset

from gyrostat.core.errors import NotYet, Refused
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.virtual_data_worker import RankedInit
from gyrostat.engine.script.job import Job
from gyrostat.integrations.batches import evaluation_of, in_turn, loader_options


def present(job: Job) -> None:
    """Tell Accelerate how many processes there are, and which this one is. Again whenever workers may have changed."""
    index = 0 if job.is_main else 1
    numbers = {
        "num_processes": job.virtual_workers,
        "process_index": index,
        "local_process_index": index,
    }
    for state in (PartialState, AcceleratorState):
        if state._shared_state:
            state._shared_state.update(numbers)


def check_plugins(state: Any) -> None:
    """Refuse what would shard the model or run its own engine."""
    for name, plugin in (
        ("DeepSpeed", "deepspeed_plugin"),
        ("FSDP", "fsdp_plugin"),
        ("Megatron-LM", "megatron_lm_plugin"),
    ):
        if getattr(state, plugin, None) is not None:
            raise Refused(
                f"Accelerate is configured for {name}; gyrostat keeps one whole replica of the model per worker and takes "
                f"the place of DDP. Remove the {name} configuration"
            )


class RankBatches:
    """The batches of one virtual worker: Accelerate's batch sampler of one of N processes."""

    def __init__(self, sampler: Any) -> None:
        self.batches = sampler

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """As `DataLoaderShard.set_epoch` does."""
        outer = self.batches
        base = getattr(outer, "batch_sampler", None)
        for thing in (outer, getattr(outer, "sampler", None), base, getattr(base, "sampler", None)):
            if callable(set_epoch := getattr(thing, "set_epoch", None)):
                set_epoch(epoch)


def rank_batches(loader: Any, rank: int, ranks: int) -> RankBatches:
    """What `loader`, prepared for one of `ranks` processes, gives to process `rank`."""
    sampler = loader.batch_sampler
    if isinstance(sampler, BatchSamplerShard):
        sampler = copy.copy(sampler)
        if sampler.num_processes == ranks:
            sampler.process_index = rank
        else:  # a sampler that knows the ranks itself
            sampler.batch_sampler = copy.copy(sampler.batch_sampler)
            sampler.batch_sampler.rank = rank
    return RankBatches(sampler)


def check_loader(loader: Any) -> None:
    if isinstance(loader, DataLoaderDispatcher):
        raise NotYet(
            "Accelerate would read this dataset on one process and send batches to the others (dispatch_batches, or an "
            "iterable dataset); use a dataset with __len__ and __getitem__, and dispatch_batches=False"
        )
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise NotYet(
            "iterable datasets are not divided among virtual workers here; use one with __len__ and __getitem__"
        )


def training_loader(job: Job, loader: Any) -> OrderedLoader:
    """The loader of `job.steps` with the batches of Accelerate's."""
    check_loader(loader)
    ranks = job.virtual_workers
    return job.dataloader(
        loader.dataset,
        batch_sampler=lambda rank: rank_batches(loader, rank, ranks),
        lookahead=True,
        **loader_options(loader, _init_of_ranks(loader.worker_init_fn)),
    )


def _init_of_ranks(init: Any) -> Any:
    """Trainer gives data workers a function that knows the rank of the process."""
    if not isinstance(init, partial) or "rank" not in init.keywords:
        return init
    return RankedInit(lambda rank: partial(init, rank=rank))


def evaluation_loader(job: Job, loader: Any) -> tuple[OrderedLoader, list[int]]:
    """The loader of `job.evaluate` with the batches of Accelerate's; and how many samples of each have not come before.

    Accelerate fills the last batches with samples from the beginning, which `gather_for_metrics` cuts off.
    """
    check_loader(loader)
    ranks = job.virtual_workers
    of_rank = [list(rank_batches(loader, rank, ranks)) for rank in range(ranks)]
    order = in_turn(of_rank)
    left, fresh = len(loader.dataset), []
    for batch in order:
        fresh.append(min(len(batch), left))
        left -= fresh[-1]
    return evaluation_of(job, loader, order), fresh

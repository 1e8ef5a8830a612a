"""What Lightning makes for the data of one rank, made for a virtual rank: its sampler, and the seeds of its data workers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DistributedSampler

from gyrostat.data.virtual_data_worker import RankedInit
from gyrostat.integrations import environment


def rank_sampler(sampler: Any, rank: int) -> Any:
    """A copy of this sampler, or batch sampler, in which every DistributedSampler is that of `rank`."""
    made = copy.copy(sampler)
    if isinstance(made, DistributedSampler):
        made.rank = rank
    elif (inner := getattr(made, "sampler", None)) is not None:
        made.sampler = rank_sampler(inner, rank)
    return made


def seeded_workers(loader: Any) -> Any:
    """The `worker_init_fn` of this loader; under seed_everything(workers=True) the one that Lightning adds."""
    if loader.worker_init_fn is None and environment.lightning_seeds_workers():
        return RankedInit(lambda rank: partial(pl_worker_init_function, rank=rank))
    return loader.worker_init_fn

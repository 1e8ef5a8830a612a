"""The sampler of a virtual rank, made from the one that a framework made for rank 0 of N."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DistributedSampler


def rank_sampler(sampler: Any, rank: int) -> Any:
    """A copy of this sampler, or batch sampler, in which every DistributedSampler is that of `rank`."""
    made = copy.copy(sampler)
    if isinstance(made, DistributedSampler):
        made.rank = rank
    inner = getattr(made, "sampler", None)
    if inner is not None and not isinstance(made, DistributedSampler):
        made.sampler = rank_sampler(inner, rank)
    return made

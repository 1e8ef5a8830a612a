"""Checks whether this torch's gloo adds in the order of `gloo_order.py`: once per job, for a torch that is not known.

Compares a real all-reduce among N ranks (threads of this process) with ours, bit for bit.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.ring import Bucket, ring_sum
from gyrostat.engine.torch_internals import gloo_group, hash_store
from gyrostat.engine.transport.group import WorkerGroup

KNOWN_TORCH = ("2.13",)
_SIZES = (1, 1000, 1 << 18, 300_001)


def knows_gloo_order(ranks: int, *, torch_version: str = torch.__version__) -> bool:
    """Whether we add as DDP over this torch's gloo does: a known torch, or one that passes the comparison."""
    return torch_version.startswith(KNOWN_TORCH) or ranks <= 2 or agrees_with_gloo(min(ranks, 8))


def agrees_with_gloo(ranks: int) -> bool:
    """Compare sums of random numbers of several sizes."""
    generator = torch.Generator().manual_seed(1)
    alone = WorkerGroup(rank=0, size=1, generation=0, store=None, timeout_s=60)
    for size in _SIZES:
        inputs = [torch.randn(size, generator=generator) for _ in range(ranks)]
        ours = torch.empty(size)
        ring_sum(Bucket.of(dict(enumerate(inputs)), ours, ranks), Placement.even(ranks, 1), alone)
        if not torch.equal(ours, _all_reduce(inputs)):
            return False
    return True


def _all_reduce(inputs: list[torch.Tensor]) -> torch.Tensor:
    """gloo's own sum, with a thread per rank."""
    store = hash_store()

    def run(rank: int) -> torch.Tensor:
        group = gloo_group(store, rank, len(inputs), timedelta(seconds=60))
        mine = inputs[rank].clone()
        group.allreduce([mine]).wait()
        return mine

    with ThreadPoolExecutor(len(inputs)) as threads:
        first, *_ = threads.map(run, range(len(inputs)))
        return first

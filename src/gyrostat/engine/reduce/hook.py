"""The tree order as a communication hook for plain DDP jobs, on any back end.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, gyrostat.tree_hook)

Gradients are then added along the same fixed tree over ranks as under `gyrostat run --reduction tree`, so that a DDP job on N
processes and a gyrostat job of N virtual workers end with the same bits. Neither buckets nor a restart change the result, so
the hook also makes DDP itself restart-invariant.

Each rank is responsible for a share of the elements: it receives that share from all ranks, adds along the tree, and sends the
result to all: as many bytes as an all-reduce sends.
"""

# No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.
from typing import Any

import torch
import torch.distributed as dist

from gyrostat.engine.reduce.tree_exchange import tree_sum


def tree_hook(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over all ranks of `group` (None: the default one), added along the tree."""
    gradients = bucket.buffer()
    ranks = dist.get_world_size(group)
    share = -(-gradients.numel() // ranks)
    padded = torch.zeros(share * ranks, dtype=gradients.dtype, device=gradients.device)
    torch.mul(gradients, 1.0 / ranks, out=padded[: gradients.numel()])
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    mine = torch.empty(share, dtype=gradients.dtype, device=gradients.device)
    tree_sum({(r, r + 1): received[r * share : (r + 1) * share] for r in range(ranks)}, (0, ranks), mine)
    dist.all_gather_into_tensor(padded, mine, group=group)
    gradients.copy_(padded[: gradients.numel()])
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(gradients)
    return done

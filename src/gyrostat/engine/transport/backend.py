"""Two decisions, each with its reason: the order in which gradients are added, and the backend that carries them.

The order decides bits, so its default depends only on the type of the job's devices and on torch, which the fingerprint
holds as it holds the order. It does not depend on the number of workers, which may change while a job runs. The backend
decides no bits: NCCL where every worker has a GPU of its own, otherwise gloo, through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gyrostat.core.errors import Refused
from gyrostat.core.job import GradientBackend, ReductionOrder


def choose_order(
    wanted: ReductionOrder | None, *, device: str, nccl: bool, gloo_known: bool = True
) -> tuple[ReductionOrder, str]:
    """The order for a job on devices of type `device`, and why.

    `nccl`: torch has NCCL. `gloo_known`: gyrostat knows the order in which torch's gloo adds.
    """
    if wanted is ReductionOrder.DDP and not gloo_known:
        raise Refused(
            f"torch {torch.__version__} adds gradients in an order that gyrostat does not know, so it cannot promise the bits "
            "of its DDP; use a torch that docs/explanation/reduction.md names, or --reduction tree, which does not need it"
        )
    if wanted is not None:
        return wanted, "requested"
    if device == "cuda" and nccl:
        return ReductionOrder.TREE, "the default on GPUs with NCCL"
    if not gloo_known:
        return ReductionOrder.TREE, f"torch {torch.__version__} adds in an order that gyrostat does not know"
    if device == "cuda":
        return ReductionOrder.DDP, "the default on GPUs with a torch that has no NCCL"
    return ReductionOrder.DDP, f"the default on devices of type {device}"


def choose_backend(
    order: ReductionOrder, gpus: Sequence[str], *, nccl: bool
) -> tuple[GradientBackend | None, str]:
    """The backend that carries gradients, and why. `gpus`: a unique name of each worker's GPU, empty if it has none."""
    if len(gpus) == 1:
        return None, "a lone worker sends no gradients"
    if "" in gpus:
        return GradientBackend.GLOO, "gloo carries what is in host memory"
    if order is ReductionOrder.DDP:
        return GradientBackend.GLOO, "the order of DDP over gloo is gloo's"
    if not nccl:
        return GradientBackend.GLOO, "this torch has no NCCL"
    if len(set(gpus)) < len(gpus):
        return (
            GradientBackend.GLOO,
            f"{len(gpus)} workers share {len(set(gpus))} GPUs, and NCCL needs one for each",
        )
    return GradientBackend.NCCL, "every worker has a GPU of its own"


def has_room_to_fold(needed: int, free: int) -> bool:
    """Whether sums of `needed` bytes are kept on a device with `free` bytes when its module is tracked.

    A quarter at most: activations and the optimizer's state are allocated later.
    """
    return needed <= free // 4

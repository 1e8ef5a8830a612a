"""In which order gradients are added if nobody said so, and what they travel over: two decisions, each with its reason.

The order decides bits, so its default depends on nothing that may change while a job lives: not on the number of workers,
only on the type of its devices and on its torch, which are in the fingerprint as the order is. What carries the gradients
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
    """The order for a job on devices of type `device`. `nccl`: torch has NCCL. `gloo_known`: we know how its gloo adds."""
    if wanted is ReductionOrder.DDP and not gloo_known:
        raise Refused(
            f"torch {torch.__version__} adds gradients in an order that gyrostat does not know, so it cannot promise the bits "
            "of its DDP; use a torch that docs/explanation/reduction.md names, or --reduction tree, which does not need it"
        )
    if wanted is not None:
        return wanted, "asked for"
    if device == "cuda" and nccl:
        return ReductionOrder.TREE, "the default on GPUs with NCCL"
    if not gloo_known:
        return ReductionOrder.TREE, f"torch {torch.__version__} adds in an order that gyrostat does not know"
    if device == "cuda":
        return ReductionOrder.DDP, "the default on GPUs with a torch that has no NCCL"
    return ReductionOrder.DDP, f"the default on devices of type {device}"


def choose_carrier(
    order: ReductionOrder, gpus: Sequence[str], *, nccl: bool
) -> tuple[GradientBackend | None, str]:
    """What gradients travel over among workers with these GPUs: a unique name of each worker's, empty if it has none."""
    if len(gpus) == 1:
        return None, "a lone worker's gradients do not travel"
    if "" in gpus:
        return GradientBackend.GLOO, "gloo carries what is in host memory"
    if order is ReductionOrder.DDP:
        return GradientBackend.GLOO, "the order of DDP over gloo is gloo's"
    if not nccl:
        return GradientBackend.GLOO, "this torch has no NCCL"
    if len(set(gpus)) < len(gpus):
        return (
            GradientBackend.GLOO,
            f"{len(gpus)} workers share {len(set(gpus))} GPUs, and NCCL wants one for each",
        )
    return GradientBackend.NCCL, "every worker has a GPU of its own"


def has_room_to_fold(needed: int, free: int) -> bool:
    """Whether sums of `needed` bytes are kept on a device that has `free` bytes when its module is tracked.

    A quarter: activations and the optimizer's state are still to come.
    """
    return needed <= free // 4

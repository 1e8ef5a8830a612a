"""The order in which gradients are added, the backend that carries them, and where sums are folded: decisions with reasons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gyrostat.core.errors import Refused
from gyrostat.core.job import GradientBackend, ReductionOrder
from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.tree import folding_home, most_sets
from gyrostat.engine.transport.backend import choose_backend, choose_order, has_room_to_fold

HOST, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("wanted", "device", "nccl", "order", "reason"),
    [
        (None, "cpu", False, ReductionOrder.DDP, "the default on devices of type cpu"),
        (None, "cpu", True, ReductionOrder.DDP, "the default on devices of type cpu"),
        (None, "cuda", False, ReductionOrder.DDP, "the default on GPUs with a torch that has no NCCL"),
        (None, "cuda", True, ReductionOrder.TREE, "the default on GPUs with NCCL"),
        (ReductionOrder.DDP, "cuda", True, ReductionOrder.DDP, "requested"),
        (ReductionOrder.TREE, "cpu", False, ReductionOrder.TREE, "requested"),
    ],
)
def test_order(
    wanted: ReductionOrder | None, device: str, nccl: bool, order: ReductionOrder, reason: str
) -> None:
    assert choose_order(wanted, device=device, nccl=nccl) == (order, reason)


def test_a_torch_whose_gloo_adds_in_another_way() -> None:
    """Its jobs use the tree order by default; asking for DDP's order is refused."""
    order, reason = choose_order(None, device="cpu", nccl=False, gloo_known=False)
    assert order is ReductionOrder.TREE
    assert "does not know" in reason
    with pytest.raises(Refused, match="--reduction tree"):
        choose_order(ReductionOrder.DDP, device="cpu", nccl=False, gloo_known=False)


@pytest.mark.parametrize(
    ("order", "gpus", "nccl", "backend", "reason"),
    [
        (ReductionOrder.TREE, ["a"], True, None, "a lone worker sends no gradients"),
        (ReductionOrder.TREE, ["a", "b"], True, GradientBackend.NCCL, "every worker has a GPU of its own"),
        (ReductionOrder.TREE, ["a", "b"], False, GradientBackend.GLOO, "this torch has no NCCL"),
        (ReductionOrder.DDP, ["a", "b"], True, GradientBackend.GLOO, "the order of DDP over gloo is gloo's"),
        (ReductionOrder.TREE, ["", ""], True, GradientBackend.GLOO, "gloo carries what is in host memory"),
        (ReductionOrder.TREE, ["a", ""], True, GradientBackend.GLOO, "gloo carries what is in host memory"),
        (
            ReductionOrder.TREE,
            ["a", "b", "a"],
            True,
            GradientBackend.GLOO,
            "3 workers share 2 GPUs, and NCCL needs one for each",
        ),
    ],
)
def test_backend(
    order: ReductionOrder, gpus: list[str], nccl: bool, backend: GradientBackend | None, reason: str
) -> None:
    assert choose_backend(order, gpus, nccl=nccl) == (backend, reason)


def test_room() -> None:
    assert has_room_to_fold(25, 100)
    assert not has_room_to_fold(26, 100)


@pytest.mark.parametrize(("held", "workers", "sets"), [(1, 1, 1), (1, 2, 3), (8, 1, 4), (8, 2, 6), (9, 2, 7)])
def test_sets_of_gradients(held: int, workers: int, sets: int) -> None:
    assert most_sets(held, workers) == sets


@pytest.mark.parametrize(
    ("own", "workers", "travels_on", "free", "home"),
    [
        (HOST, 1, HOST, 0, HOST),
        (HOST, 2, GPU, 10**9, HOST),
        (GPU, 2, HOST, 10**9, HOST),
        (GPU, 2, GPU, 4 * 5000, GPU),
        (GPU, 2, GPU, 4 * 5000 - 1, HOST),
        (GPU, 1, HOST, 4 * 3000, GPU),
        (GPU, 1, HOST, 4 * 3000 - 1, HOST),
    ],
)
def test_where_sums_are_folded(
    monkeypatch: pytest.MonkeyPatch,
    own: torch.device,
    workers: int,
    travels_on: torch.device,
    free: int,
    home: torch.device,
) -> None:
    """Four virtual workers here, gradients of 1000 bytes: 3 sets of them, and 2 more where there are others."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    parameters: list[Any] = [SimpleNamespace(device=own, nbytes=600), SimpleNamespace(device=own, nbytes=400)]
    group: Any = SimpleNamespace(rank=0, size=workers, gradients_on=travels_on)
    assert folding_home(parameters, Placement.even(4 * workers, workers), group) == home

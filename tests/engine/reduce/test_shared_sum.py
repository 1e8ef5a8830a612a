"""Sums through shared memory: the same bits as by messages, in both orders, and nothing is sent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.reduce.ddp import DdpOrder
from gyrostat.engine.reduce.tree import TreeOrder
from gyrostat.engine.transport.group import WorkerGroup
from tests.engine.reduce.test_ring import PLACEMENTS

SIZES = ((1,), (7, 5), (20_011,), (300, 100))
MAKE: dict[str, Callable[[list[torch.nn.Parameter], Placement, WorkerGroup], DdpOrder | TreeOrder]] = {
    "ddp": lambda parameters, placement, group: DdpOrder(
        parameters, DdpOptions(bucket_cap_mb=0.05), placement, group
    ),
    "tree": TreeOrder,
}


def gradients(ranks: int, pass_: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * ranks + pass_)
    return [[torch.randn(size, generator=generator).to(dtype) for size in SIZES] for _ in range(ranks)]


def reduce(
    order: str, placement: Placement, path: Path, dtype: torch.dtype, *, passes: int = 4
) -> list[list[list[torch.Tensor]]]:
    """Every worker in a thread of its own; the means of every pass. From the second on, the last virtual worker is streamed."""
    given = [gradients(placement.virtual_workers, pass_, dtype) for pass_ in range(passes)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in given[0][0]]
    no = [False] * len(parameters)

    def work(worker: int) -> list[list[torch.Tensor]]:
        group = WorkerGroup(rank=worker, size=placement.workers, generation=1, store=str(path), timeout_s=60)
        groups.append(group)
        reduction = MAKE[order](parameters, placement, group)
        *others, last = placement.held_by(worker)
        means = []
        for pass_, ranks in enumerate(given):
            for rank in others:
                reduction.take(rank, ranks[rank], no, None)
            if pass_ == 0 or group.size == 1:
                reduction.take(last, ranks[last], no, None)
            else:
                reduction.stream(last, no, None)
                for number in reversed(range(len(parameters))):
                    reduction.ready(number, ranks[last][number])
            means.append([mean.clone() for mean in reduction.mean()])
            reduction.close_pass(tuple(reversed(range(len(parameters)))))
        return means

    groups: list[WorkerGroup] = []
    with ThreadPoolExecutor(placement.workers) as threads:
        results = list(threads.map(work, range(placement.workers)))
    for group in groups:
        group.close()
        assert (group.shared_memory is not None) == (
            group.size > 1 and os.environ.get("GYROSTAT_SHARED_MEMORY") != "0"
        )
        assert group.shared_memory is None or group.traffic.sent == group.traffic.received == 0
    return results


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("order", MAKE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_one_worker(name: str, order: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of which test_ring.py and test_tree.py know that they are right."""
    placement = PLACEMENTS[name]
    alone = Placement.even(placement.virtual_workers, 1)
    (expected,) = reduce(order, alone, tmp_path / "one", dtype)
    for found in reduce(order, placement, tmp_path / "several", dtype):
        for pass_, exact in zip(found, expected, strict=True):
            assert all(torch.equal(mean, right) for mean, right in zip(pass_, exact, strict=True))


@pytest.mark.parametrize("order", MAKE)
def test_they_are_those_of_messages(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement.from_counts([3, 1, 2])
    shared = reduce(order, placement, tmp_path / "shared", torch.float32)
    monkeypatch.setenv("GYROSTAT_SHARED_MEMORY", "0")
    sent = reduce(order, placement, tmp_path / "sent", torch.float32)
    for mine, others in zip(shared, sent, strict=True):
        for one, another in zip(mine, others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, another, strict=True))


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = _open_regions()  # errors of other tests may still refer to theirs
    reduce("ddp", Placement.even(4, 2), tmp_path / "first", torch.float32)
    assert _open_regions() <= before


def _open_regions() -> set[int]:
    """The inodes of this process's shared memory. Threads of other tests may close files meanwhile."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "memfd:gyrostat" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return found

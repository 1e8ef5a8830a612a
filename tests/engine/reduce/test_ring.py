"""The ring across workers, against gloo's own all-reduce and against the definition; and what it sends."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.placement import Placement, Segment
from gyrostat.engine.reduce import selftest
from gyrostat.engine.reduce.gloo_order import chunks
from gyrostat.engine.reduce.ring import Bucket, ring_sum
from gyrostat.engine.transport.group import Traffic, WorkerGroup

PLACEMENTS = {
    "one": Placement.even(5, 1),
    "two": Placement.from_counts([2, 3]),
    "uneven": Placement.from_counts([1, 3, 1]),
    "each": Placement.even(5, 5),
    "several ranges": Placement((Segment(0, 0, 1), Segment(1, 1, 2), Segment(0, 2, 4), Segment(1, 4, 5))),
    "adjacent ranges": Placement((Segment(0, 0, 1), Segment(0, 1, 3), Segment(1, 3, 5))),
    "eight on three": Placement.from_counts([3, 4, 1]),
    "eight on two": Placement.even(8, 2),
}


def by_definition(inputs: list[torch.Tensor]) -> torch.Tensor:
    n, first = len(inputs), inputs[0]
    total = torch.empty_like(first)
    for chunk, (start, stop) in enumerate(chunks(first.numel(), first.element_size(), n)):
        order = [(chunk - 1 - i) % n for i in range(n)]
        part = inputs[order[0]][start:stop].clone()
        for rank in order[1:]:
            part += inputs[rank][start:stop]
        total[start:stop] = part
    return total


def run(
    placement: Placement, inputs: list[list[torch.Tensor]], path: Path
) -> tuple[list[list[torch.Tensor]], list[Traffic]]:
    """Every worker in a thread of its own; `inputs[bucket][rank]`."""

    def work(worker: int) -> tuple[list[torch.Tensor], Traffic]:
        group = WorkerGroup(rank=worker, size=placement.workers, generation=1, store=str(path), timeout_s=30)
        groups.append(group)
        held = placement.held_by(worker)
        buckets = [
            Bucket.of(
                {rank: ranks[rank] for rank in held}, torch.empty_like(ranks[0]), placement.virtual_workers
            )
            for ranks in inputs
        ]
        for bucket in buckets:
            ring_sum(bucket, placement, group)
        return [bucket.total for bucket in buckets], group.traffic

    groups: list[WorkerGroup] = []
    with ThreadPoolExecutor(placement.workers) as threads:
        results = list(threads.map(work, range(placement.workers)))
    for group in groups:
        group.close()
    return [totals for totals, _ in results], [traffic for _, traffic in results]


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_placement_adds_in_the_same_order(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    placement = PLACEMENTS[name]
    generator = torch.Generator().manual_seed(3)
    inputs = [
        [torch.randn(size, generator=generator).to(dtype) for _ in range(placement.virtual_workers)]
        for size in (1, 7, 20_011, 300_000)
    ]
    before = [[tensor.clone() for tensor in ranks] for ranks in inputs]
    totals, _ = run(placement, inputs, tmp_path / "store")
    for worker in totals:
        for total, ranks in zip(worker, inputs, strict=True):
            assert torch.equal(total, by_definition(ranks))
    assert all(
        torch.equal(a, b) for x, y in zip(inputs, before, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("counts", [[4, 4], [7, 1], [2, 3, 3], [1, 5, 1, 1], [2, 2, 2, 2]])
def test_no_worker_gathers_all_gradients(counts: list[int], tmp_path: Path) -> None:
    """Less than twice the gradients goes in and out of any worker's share of the reduction, whatever N is."""
    placement = Placement.from_counts(counts)
    elements = 80_000
    inputs = [[torch.randn(elements) for _ in range(placement.virtual_workers)]]
    _, traffic = run(placement, inputs, tmp_path / "store")
    workers, size = placement.workers, elements * 4
    each = [
        chunks(elements, 4, 8)[s.stop - 1][1] - chunks(elements, 4, 8)[s.start][0] for s in placement.segments
    ]
    for worker, counted in enumerate(traffic):
        own = each[worker] * 4
        assert counted.sent <= size + own * (workers - 1)
        assert counted.received <= size + (size - own)
    # All in all: every group goes round once and every completed chunk goes to the P-1 others.
    assert sum(counted.sent for counted in traffic) <= size * workers + size * (workers - 1)
    assert sum(counted.sent for counted in traffic) == sum(counted.received for counted in traffic)


@given(st.integers(0, 5_000_000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 16))
def test_chunks_cover_everything_once(elements: int, size: int, ranks: int) -> None:
    ranges = chunks(elements, size, ranks)
    assert len(ranges) == ranks
    assert ranges[0][0] == 0
    assert ranges[-1][1] == elements
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_this_torch_adds_as_we_say(ranks: int) -> None:
    assert selftest.agrees_with_gloo(ranks)


def test_an_unknown_torch_is_tested_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest.knows_gloo_order(5, torch_version="99.0")
    monkeypatch.setitem(selftest.__dict__, "ring_sum", lambda bucket, placement, group: bucket.total.fill_(0))
    assert not selftest.knows_gloo_order(5, torch_version="99.0")
    assert selftest.knows_gloo_order(5)  # a known one is not tested

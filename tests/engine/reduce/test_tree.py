"""The tree: its arithmetic, its folding, and what it sends.

Sums also travel as they do over NCCL, by collectives and through another memory than the one they are folded in; the group
that would be NCCL's is one of gloo's. That workers of one machine send nothing is switched off here: see test_shared.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.placement import Placement, Segment
from gyrostat.engine.reduce.tree import TreeOrder
from gyrostat.engine.reduce.tree_order import maximal_nodes, siblings, split
from gyrostat.engine.torch_internals import gloo_group
from gyrostat.engine.transport import group as group_module
from gyrostat.engine.transport.group import Traffic, WorkerGroup

pytestmark = pytest.mark.usefixtures("apart")
HOST = torch.device("cpu")
ELSEWHERE = torch.device("cpu", 0)  # the same memory by another name
CARRIERS = {"gloo": None, "collectives": HOST, "collectives elsewhere": ELSEWHERE}


def test_the_tree_of_seven() -> None:
    assert split((0, 7)) == 4
    assert split((4, 7)) == 6
    assert siblings(7) == {
        ((0, 4), (4, 7)),
        ((0, 2), (2, 4)),
        ((0, 1), (1, 2)),
        ((2, 3), (3, 4)),
        ((4, 6), (6, 7)),
        ((4, 5), (5, 6)),
    }
    assert maximal_nodes(7, [1, 2, 3, 4, 5, 6]) == [(1, 2), (2, 4), (4, 7)]
    assert maximal_nodes(8, [0, 1, 2, 3]) == [(0, 4)]


@given(st.integers(1, 40), st.data())
def test_maximal_nodes_cover_what_is_held(ranks: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, ranks - 1))
    stop = data.draw(st.integers(start + 1, ranks))
    nodes = maximal_nodes(ranks, range(start, stop))
    assert [rank for node in nodes for rank in range(*node)] == list(range(start, stop))
    assert len(nodes) <= 2 * ranks.bit_length()
    assert not any((a, b) in siblings(ranks) for a in nodes for b in nodes)


def by_definition(leaves: list[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    if stop - start == 1:
        return leaves[start] * (1.0 / len(leaves))
    middle = split((start, stop))
    return by_definition(leaves, start, middle) + by_definition(leaves, middle, stop)


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device | None:
    """Where gradients travel by collectives; None: point to point, by gloo."""
    monkeypatch.setattr(group_module, "nccl_group", gloo_group)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Stream(HOST))
    chosen: torch.device | None = CARRIERS[request.param]
    return chosen


def reduce(
    placement: Placement,
    gradients: list[list[torch.Tensor]],
    path: Path,
    carrier: torch.device | None = None,
) -> list[tuple[list[torch.Tensor], Traffic]]:
    """`gradients[rank][parameter]`; every worker in a thread of its own, twice, the second time streamed."""
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients[0]]
    no = [False] * len(parameters)

    def work(worker: int) -> tuple[list[torch.Tensor], Traffic]:
        group = WorkerGroup(rank=worker, size=placement.workers, generation=1, store=str(path), timeout_s=30)
        groups.append(group)
        if carrier is not None and group.size > 1:
            group.use_nccl(carrier)
        order = TreeOrder(parameters, placement, group)
        *others, last = placement.held_by(worker)
        for streamed in (False, True):
            group.traffic = Traffic()
            for rank in others:
                order.take(rank, gradients[rank], no, None)
            if streamed and placement.virtual_workers > 1:
                order.stream(last, no, None)
                for number in reversed(range(len(parameters))):
                    order.ready(number, gradients[last][number])
            else:
                order.take(last, gradients[last], no, None)
            means = [mean.clone() for mean in order.mean()]
        return means, group.traffic

    groups: list[WorkerGroup] = []
    with ThreadPoolExecutor(placement.workers) as threads:
        results = list(threads.map(work, range(placement.workers)))
    for group in groups:
        group.close()
    return results


def gradients(ranks: int, elements: int = 3000) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(ranks)
    return [
        [torch.randn(elements, generator=generator), torch.randn(7, 5, generator=generator)]
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("ranks", range(1, 18))
def test_every_placement_gives_the_tree(ranks: int, tmp_path: Path, carrier: torch.device | None) -> None:
    inputs = gradients(ranks)
    expected = [by_definition([rank[i] for rank in inputs], 0, ranks) for i in range(2)]
    cuts = {1: [ranks], 2: [ranks // 3 or 1], 3: [1, ranks // 2]}
    for workers in (1, 2, 3):
        if ranks < workers * 2 and workers > 1:
            continue
        first = cuts[workers] if workers > 1 else []
        counts = [*first, ranks - sum(first)]
        for means, _ in reduce(Placement.from_counts(counts), inputs, tmp_path / f"store{workers}", carrier):
            assert all(torch.equal(mean, exact) for mean, exact in zip(means, expected, strict=True))


def test_a_worker_with_several_ranges(tmp_path: Path, carrier: torch.device | None) -> None:
    inputs = gradients(6)
    placement = Placement((Segment(0, 0, 1), Segment(1, 1, 3), Segment(0, 3, 5), Segment(1, 5, 6)))
    expected = [by_definition([rank[i] for rank in inputs], 0, 6) for i in range(2)]
    for means, _ in reduce(placement, inputs, tmp_path / "store", carrier):
        assert all(torch.equal(mean, exact) for mean, exact in zip(means, expected, strict=True))


@pytest.mark.parametrize(("ranks", "workers"), [(8, 2), (8, 4), (16, 4), (4, 4)])
def test_an_aligned_placement_sends_what_an_all_reduce_sends(
    ranks: int, workers: int, tmp_path: Path, carrier: torch.device | None
) -> None:
    inputs = gradients(ranks, 80_000)
    size = sum(tensor.nbytes for tensor in inputs[0])
    all_reduce = 2 * (1 - 1 / workers) * size
    for _, traffic in reduce(Placement.even(ranks, workers), inputs, tmp_path / "store", carrier):
        assert traffic.sent <= 1.05 * all_reduce


@pytest.mark.parametrize("elements", [1, 2, 3, 7])
def test_fewer_elements_than_workers(elements: int, tmp_path: Path, carrier: torch.device | None) -> None:
    inputs = [[gradient[:elements]] for gradient, _ in gradients(5)]
    expected = by_definition([gradient for [gradient] in inputs], 0, 5)
    for means, _ in reduce(Placement.from_counts([1, 1, 2, 1]), inputs, tmp_path / "store", carrier):
        assert torch.equal(means[0], expected)


def test_what_travels_does_not_depend_on_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One subtree on one worker, three on the other; the number of elements is even, so that shares are equal."""
    monkeypatch.setattr(group_module, "nccl_group", gloo_group)
    inputs = [[gradient] for gradient, _ in gradients(7)]
    placement = Placement.from_counts([1, 6])
    one, other = (
        [traffic for _, traffic in reduce(placement, inputs, tmp_path / name, chosen)]
        for name, chosen in (("gloo", None), ("collectives", HOST))
    )
    assert one == other
    assert [traffic.sent for traffic in one] == [(1 + 1) * 1500 * 4, (3 + 1) * 1500 * 4]


def test_sums_in_host_memory_are_complete_for_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they travel through a GPU's memory, its stream is waited for before anybody may look or write."""
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(True)

    monkeypatch.setattr(group_module, "nccl_group", gloo_group)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    reduce(Placement.even(4, 2), gradients(4), tmp_path / "one", HOST)
    assert waited == []
    reduce(Placement.even(4, 2), gradients(4), tmp_path / "two", ELSEWHERE)
    assert waited == [True] * 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16, 17])
def test_folding_needs_few_buffers(ranks: int) -> None:
    """Sums that wait for their other half: at most log2 N, and one for the leaf that is added."""
    alone = WorkerGroup(rank=0, size=1, generation=1, store=None, timeout_s=1)
    [inputs] = [gradients(ranks, 10)]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in inputs[0]]
    order = TreeOrder(parameters, Placement.even(ranks, 1), alone)
    for rank in range(ranks):
        order.take(rank, inputs[rank], [False, False], None)
    order.mean()
    assert order.allocated_sets <= (ranks - 1).bit_length() + 1

"""A batch source gives every virtual worker the batches of its rank's DataLoader, with any others, and after moves.

Here both sides run in one process, so many combinations are cheap: ranks take turns, each in its own streams, and draw
between their batches as a model with dropout does. `tests/determinism/test_batch_sources.py` is the same with whole jobs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from gyrostat.data.loader import OrderedLoader
from gyrostat.data.options import make_loader
from gyrostat.data.position import Position
from gyrostat.data.rng import RngState, Streams, seed_all
from gyrostat.data.shared_source import SharedBatchSource, make_batch_source
from gyrostat.engine.state import statetree

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch counts our cores

SEED = 4
EPOCHS = 2
Batch = list[list[float]]


class Noisy(Dataset[torch.Tensor]):
    """Draws from all three sources; counts its samples if it is asked to."""

    def __init__(self, samples: int, *, counts: bool = False) -> None:
        self.samples, self.count, self.step = samples, 0, 0.1 if counts else 0.0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += self.step > 0
        info = get_worker_info()
        who = 0 if info is None else info.id + info.seed % 97
        noise = torch.randn(2) + np.random.normal() + random.gauss(0, 1)
        return noise + index + who + self.step * self.count


def make(dataset: Any, n: int, **options: Any) -> OrderedLoader:
    named = {"batch_size": 3, "shuffle": True, "num_workers": 0, "drop_last": False}
    settings = named | {key: options.pop(key) for key in tuple(options) if key in named}
    return make_loader(
        dataset,
        virtual_workers=n,
        pad=True,
        pin_memory=False,
        collate_fn=None,
        others=options,
        ranks=range(n),
        **settings,
    )


def expected(loader: OrderedLoader, n: int) -> dict[int, list[Batch]]:
    """By rank: what torch's DataLoader gives, and what is drawn after each batch."""
    return {rank: _on_rank(loader, rank, n) for rank in range(n)}


def _on_rank(loader: OrderedLoader, rank: int, n: int) -> list[Batch]:
    seed_all(SEED + rank)
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, n, rank, loader.shuffle, seed=SEED)  # type: ignore[arg-type]
    options: dict[str, Any] = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    theirs = DataLoader(
        loader.dataset,  # type: ignore[arg-type]
        loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        drop_last=loader.drop_last,
        persistent_workers=loader.persistent_workers,
        **options,
    )
    seen = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen += [[*batch.tolist(), torch.rand(1).tolist()] for batch in theirs]
    return seen


@dataclass
class RankGroup:
    """Some virtual workers on one worker."""

    loader: OrderedLoader
    ranks: Sequence[int]
    contexts: dict[int, RngState]
    positions: dict[int, Position]
    seen: dict[int, list[Batch]]
    streams: Streams = field(default_factory=Streams)

    def run(self, epoch: int, first: int, last: int) -> None:
        """The micro-batches from `first` up to `last` of an epoch; then somebody else goes on."""
        order = self.loader.order(seed=SEED, epoch=epoch)
        source = make_batch_source(self.loader, self.ranks, self.streams)
        positions = {rank: self.positions[rank] for rank in self.ranks if rank in self.positions}
        source.begin_loop(order, epoch=epoch, accumulate=1, first_batch=first, positions=positions)
        for rank in self.ranks:
            self.within(rank, source.resume if source.resumes else source.start)
        source.started = True
        for _ in range(first, last):
            source.begin_step()
            for rank in self.ranks:
                self.seen[rank].append(
                    self.within(rank, lambda rank: [*source.fetch(rank, 0).tolist(), torch.rand(1).tolist()])
                )
        if last < order.batches:  # batches are in flight: they are made anew
            self.positions |= {rank: carried(source.position(rank)) for rank in self.ranks}
            source.close()
        else:
            source.end_loop()
            self.positions |= {rank: carried(source.position(rank)) for rank in self.ranks}
            source.close()

    def within(self, rank: int, do: Callable[[int], Any]) -> Any:
        outside = self.streams.exchange(self.contexts[rank])
        result = do(rank)
        self.contexts[rank] = self.streams.exchange(outside)
        return result


def carried(position: Position) -> Position:
    return Position.from_tree(statetree.decode(statetree.encode(position.to_tree())))


def streams_of(rank: int) -> RngState:
    seed_all(SEED + rank)
    return Streams().save()


def assert_same(
    loader: OrderedLoader, n: int, parts: Sequence[Sequence[int]], cuts: Sequence[int] = ()
) -> None:
    """Ranks shared out among several workers, in another way after every cut."""
    wanted = expected(loader, n)
    contexts = {rank: streams_of(rank) for rank in range(n)}
    positions: dict[int, Position] = {}
    seen: dict[int, list[Batch]] = {rank: [] for rank in range(n)}
    batches = loader.order(seed=SEED, epoch=0).batches
    ways = itertools.cycle([parts, [range(n)]] if cuts else [parts])
    for epoch in range(EPOCHS):
        for first, last in itertools.pairwise(sorted({0, *cuts, batches})):
            for ranks in next(ways):
                RankGroup(loader, ranks, contexts, positions, seen).run(epoch, first, last)
    assert seen == wanted


@pytest.mark.parametrize(
    ("n", "parts"),
    [
        (2, [[0], [1]]),
        (3, [[0, 1, 2]]),
        (3, [[0], [1, 2]]),
        (4, [[0, 1, 2], [3]]),
        (8, [range(5), [5, 6, 7]]),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_bits(n: int, parts: Sequence[Sequence[int]], num_workers: int) -> None:
    assert_same(make(Noisy(11 * n + 1), n, num_workers=num_workers), n, parts)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("cuts", [[1], [2, 3]])
def test_goes_on_elsewhere_with_batches_in_flight(num_workers: int, cuts: list[int]) -> None:
    dataset = Noisy(32, counts=num_workers > 0)
    assert_same(make(dataset, 3, num_workers=num_workers), 3, [[0], [1, 2]], cuts)


@pytest.mark.parametrize("prefetch_factor", [1, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_options(prefetch_factor: int, drop_last: bool) -> None:
    loader = make(
        Noisy(29, counts=True), 2, num_workers=2, prefetch_factor=prefetch_factor, drop_last=drop_last
    )
    assert_same(loader, 2, [[0, 1]])


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.full)])
def test_start_methods(method: str) -> None:
    loader = make(Noisy(9), 2, num_workers=1, multiprocessing_context=method)
    forked = make(Noisy(9), 2, num_workers=1)
    contexts = {rank: streams_of(rank) for rank in range(2)}
    seen: dict[int, list[Batch]] = {0: [], 1: []}
    RankGroup(loader, [0, 1], contexts, {}, seen).run(0, 0, 2)
    assert seen == {rank: batches[:2] for rank, batches in expected(forked, 2).items()}


def started(loader: OrderedLoader, n: int) -> SharedBatchSource:
    source = make_batch_source(loader, range(n), Streams())
    assert isinstance(source, SharedBatchSource)
    source.begin_loop(loader.order(seed=SEED, epoch=0), epoch=0, accumulate=1, first_batch=0, positions={})
    for rank in range(n):
        seed_all(SEED + rank)
        source.start(rank)
    source.started = True
    return source


def test_num_workers_processes_in_all() -> None:
    source = started(make(Noisy(40), 8, num_workers=2), 8)
    assert len(source.workers.pids) == 2
    source.close()


def test_a_virtual_worker_that_will_move_can_be_handed_over_ahead() -> None:
    """Virtual worker 1 leaves at boundary 3: nothing of it is prepared from there on, and its position there is known."""
    source = started(make(Noisy(60, counts=True), 2, num_workers=2, prefetch_factor=4), 2)
    ahead = source.leave_at(1, 3)
    for step in range(3):
        source.begin_step()
        for rank in range(2):
            source.fetch(rank, 0)
        ahead = ahead or source.leave_at(1, 3)
        if step == 1:  # all that will be prepared has been asked for
            while ahead is None:
                ahead = source.leave_at(1, 3)
    assert ahead is not None
    assert source.leave_at(1, 4) is None
    assert statetree.encode(ahead.to_tree()) == statetree.encode(source.position(1).to_tree())
    source.close()


def test_a_change_that_is_called_off_leaves_no_trace() -> None:
    """Virtual worker 1 was to leave and 2 to come; then all stays as it was, to the bit."""
    loader = make(Noisy(90, counts=True), 3, num_workers=2)
    whole, source = started(loader, 3), started(loader, 2)
    seen = []
    for step in range(6):
        whole.begin_step()
        source.begin_step()
        if step == 1:
            source.leave_at(1, 4)
            source.expect(2, whole.position(2))
        if step == 3:
            source.call_off()
            assert source.ranks == range(2)
        for rank in range(2):
            seen.append((whole.fetch(rank, 0).tolist(), source.fetch(rank, 0).tolist()))
        whole.fetch(2, 0)
    assert all(a == b for a, b in seen)
    whole.close()
    source.close()


def test_virtual_workers_come_and_go_while_others_stay() -> None:
    """The same processes go on, and what they had made for those that stay is not made again."""
    loader = make(Noisy(120, counts=True), 4, num_workers=2)
    whole, source = started(loader, 4), started(loader, 4)
    wanted: list[Any] = []
    seen: list[Any] = []
    pids = source.workers.pids
    away: dict[int, Position] = {}
    for step, here in enumerate([(0, 1, 2, 3), (0, 1, 2, 3), (0, 2), (0, 2), (0, 1, 2), (0, 1, 2, 3)]):
        positions = {rank: source.position(rank) for rank in source.ranks} | away
        if tuple(source.ranks) != here:
            assert source.rehost(here, positions)
        whole.begin_step()
        source.begin_step()
        wanted.append({rank: whole.fetch(rank, 0).tolist() for rank in range(4)})
        seen.append({rank: source.fetch(rank, 0).tolist() for rank in here})
        away = {rank: whole.position(rank) for rank in range(4) if rank not in here}
        assert len(source.workers.pids) == 2, step
    assert all(
        batch == wanted[step][rank] for step, batches in enumerate(seen) for rank, batch in batches.items()
    )
    assert source.workers.pids == pids
    whole.close()
    source.close()

"""The placement after a death, and the backed-up contexts of relocated virtual workers."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.placement import Placement
from gyrostat.data.rng import RngState, Streams, seed_all
from gyrostat.engine.reconfigure.recovery import SurvivorReport, share_out
from gyrostat.engine.state.digest import digest
from gyrostat.engine.training.backups import ContextBackups
from gyrostat.engine.training.context import Context


def test_survivors_keep_their_virtual_workers_and_the_others_go_to_the_one_with_fewest() -> None:
    reports = [SurvivorReport(9, (0, 1, 2), 4), SurvivorReport(9, (6,), 4)]
    placement = share_out(reports, 8)
    assert [placement.held_by(worker) for worker in range(2)] == [(0, 1, 2, 5), (3, 4, 6, 7)]


def test_the_survivor_with_more_completed_collectives_keeps_what_two_claim() -> None:
    """The second worker has passed a fence at which it got virtual worker 1, the first has not."""
    reports = [SurvivorReport(8, (0, 1), 3), SurvivorReport(9, (1, 2), 3)]
    assert share_out(reports, 3).held_by(1) == (1, 2)


@given(st.integers(1, 17), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_virtual_worker_is_run_once(ranks: int, workers: int, rng: random.Random) -> None:
    """Whichever workers of a placement die."""
    workers = min(workers, ranks)
    before = Placement.even(ranks, workers)
    survivors = sorted(rng.sample(range(workers), rng.randint(1, workers)))
    after = share_out([SurvivorReport(5, before.held_by(worker), 2) for worker in survivors], ranks)
    assert sorted(rank for worker in range(after.workers) for rank in after.held_by(worker)) == list(
        range(ranks)
    )
    for number, worker in enumerate(survivors):
        assert set(before.held_by(worker)) <= set(after.held_by(number))
    counts = [len(after.held_by(worker)) for worker in range(after.workers)]
    assert max(counts) - min(counts) <= max(1, max(len(before.held_by(worker)) for worker in survivors))


def contexts(ranks: int) -> dict[int, Context]:
    streams, made = Streams(), {}
    before = streams.save()
    for rank in range(ranks):
        seed_all(rank)
        made[rank] = Context(streams.save())
    streams.exchange(before)
    return made


def drawn(state: RngState) -> RngState:
    """After a draw from each stream."""
    streams = Streams()
    before = streams.exchange(state)
    torch.rand(3)
    np.random.rand(2)
    random.gauss(0, 1)
    return streams.exchange(before)


def test_the_changes_of_a_pass_bring_backups_up_to_date() -> None:
    mine, everybody = contexts(3), ContextBackups()
    elsewhere = ContextBackups()
    for backups in (everybody, elsewhere):
        backups.hold([context.to_tree() for context in mine.values()])
    assert all(
        (change.torch, change.numpy, change.python, change.rest) == (None, None, None, None)
        for change in everybody.changes(mine, None)
    )
    mine[1].rng = drawn(mine[1].rng)
    mine[2].local = {"seen": torch.arange(4), "text": "so far"}
    mine[2].buffers = {"model": [torch.ones(2)]}
    elsewhere.begin_step()
    elsewhere.take(everybody.changes(mine, None))
    for rank, context in mine.items():
        assert digest(it=elsewhere.of(rank).to_tree()) == digest(it=context.to_tree())
    assert digest(it=elsewhere.at_step(1).to_tree()) == digest(it=contexts(3)[1].to_tree())

"""Buffers and random streams of virtual workers that share one model: what each of them sees, and what is shared afterwards."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from gyrostat.core.errors import Misuse
from gyrostat.core.placement import Placement
from gyrostat.engine.training.backups import ContextBackups, NoBackups
from gyrostat.engine.training.buffer_sync import BufferSync
from gyrostat.engine.training.buffers import pack, unpack
from gyrostat.engine.training.context_switch import ContextSwitch
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.transport.group import WorkerGroup
from gyrostat.engine.transport.pending import Pending


class Counting(nn.Module):
    """Counts forwards in a buffer, and has a parameter."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach()
        return self.weight * x


class World:
    """Virtual workers 0 … ranks-1 on one worker, with one counting module."""

    def __init__(
        self, ranks: int = 2, *, broadcast: bool = True, backups: ContextBackups | None = None
    ) -> None:
        group = WorkerGroup(rank=0, size=1, generation=1, store=None, timeout_s=1.0)
        self.generation = CurrentGeneration(Placement.even(ranks, 1), group)
        self.module, self.buffers = Counting(), BufferSync(self.generation)
        self.buffers.add("module", self.module, trained=True, broadcast=broadcast)
        self.contexts = ContextSwitch(self.generation, self.buffers, backups or NoBackups(), seed=5)
        self.contexts.start()

    def run(self, *forwards: float, last: bool = True) -> list[float]:
        """A pass in which virtual worker r adds forwards[r]. Returns what each found in its buffer."""
        found = []
        self.contexts.begin_pass()
        for rank, value in enumerate(forwards):
            self.contexts.switch_in(rank)
            self.contexts.begin_micro_batch(last=last)
            found.append(self.module.seen.item())
            self.module(torch.tensor([value]))
            self.contexts.switch_out(rank)
        self.contexts.end_pass()
        self.buffers.settle()
        return found


def test_every_virtual_worker_starts_with_the_shared_buffers_and_rank_0s_remain() -> None:
    world = World(3)
    assert world.run(1.0, 10.0, 100.0) == [0.0, 0.0, 0.0]
    assert world.run(1.0, 10.0, 100.0) == [1.0, 1.0, 1.0]
    assert world.module.seen.item() == 2.0


def test_without_broadcast_every_virtual_worker_keeps_its_own() -> None:
    world = World(2, broadcast=False)
    world.run(1.0, 10.0)
    assert world.run(1.0, 10.0) == [1.0, 10.0]
    assert world.contexts.contexts[1].buffers["module"][0].item() == 20.0


def test_what_the_script_sets_between_passes_counts_for_all() -> None:
    world = World(2, broadcast=False)
    world.run(1.0, 10.0)
    world.module.seen.fill_(7.0)
    assert world.run(1.0, 10.0) == [7.0, 7.0]


def test_a_second_synchronising_forward_uses_rank_0s_buffers() -> None:
    world = World(2)
    seen = []
    world.contexts.begin_pass()
    for rank, value in ((0, 1.0), (1, 10.0)):
        world.contexts.switch_in(rank)
        world.contexts.begin_micro_batch(last=True)
        world.module(torch.tensor([value]))
        world.module(torch.tensor([value]))
        seen.append(world.module.seen.item())
        world.contexts.switch_out(rank)
    assert seen == [2.0, 11.0]  # rank 1's second forward began with the 1.0 of rank 0


def test_more_forwards_than_rank_0_are_refused() -> None:
    world = World(2)
    world.run(1.0)
    world.contexts.switch_in(1)
    world.module(torch.ones(1))
    with pytest.raises(Misuse, match="more often in one micro-batch than virtual worker 0"):
        world.module(torch.ones(1))


def test_a_buffer_that_appears_in_a_micro_batch_is_refused() -> None:
    world = World(1)
    world.contexts.begin_pass()
    world.contexts.switch_in(0)
    world.module.register_buffer("late", torch.ones(1))
    with pytest.raises(Misuse, match="got or lost a buffer"):
        world.contexts.switch_out(0)


def test_the_pass_a_worker_missed_is_settled_with_the_buffers_it_receives() -> None:
    class Other:
        rank, size, generation = 1, 2, 1

        def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
            raise AssertionError("not in a pass that was missed")

    module = Counting()
    buffers = BufferSync(CurrentGeneration(Placement.even(2, 2), cast(WorkerGroup, Other())))
    buffers.add("module", module, trained=True, broadcast=True)
    room = buffers.empty_like_packed()
    room.copy_(pack([torch.tensor([42.0])]))
    buffers.receive_missed(room)
    buffers.settle()
    assert module.seen.item() == 42.0
    assert buffers.last is room


def test_packed_tensors_keep_their_bits_shapes_and_types() -> None:
    tensors = [torch.randn(2, 3), torch.tensor(5), torch.tensor([True, False]), torch.empty(0)]
    copies = unpack(pack(tensors), tensors)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    assert [(copy.dtype, copy.shape) for copy in copies] == [(t.dtype, t.shape) for t in tensors]
    assert unpack(pack([]), []) == []


def test_every_virtual_worker_has_its_own_streams_and_the_outer_code_another() -> None:
    world = World(2)
    outer = world.contexts.streams.save()

    def draw() -> list[float]:
        drawn = []
        world.contexts.begin_pass()
        for rank in (0, 1):
            world.contexts.switch_in(rank)
            drawn.append(torch.rand(()).item())
            world.contexts.switch_out(rank)
        world.contexts.end_pass()
        return drawn

    drawn = [draw(), draw()]
    expected = []
    for rank in (0, 1):
        generator = torch.Generator().manual_seed(5 + rank)
        expected.append([torch.rand((), generator=generator).item() for _ in range(2)])
    assert list(map(list, zip(*drawn, strict=True))) == expected
    assert torch.equal(world.contexts.streams.save().torch, outer.torch)
    assert world.contexts.in_streams_of(1, lambda rank: torch.rand(()).item()) not in drawn[1]
    assert torch.equal(world.contexts.streams.save().torch, outer.torch)


def test_backups_hold_the_fresh_contexts_of_all_virtual_workers() -> None:
    backups = ContextBackups()
    world = World(2, backups=backups)
    for rank, context in world.contexts.contexts.items():
        assert torch.equal(backups.of(rank).rng.torch, context.rng.torch)

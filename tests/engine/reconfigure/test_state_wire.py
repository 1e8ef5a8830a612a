"""Memory between a donor and newcomers: which process holds it, and how it is released."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from gyrostat.core.job import NextGeneration
from gyrostat.core.placement import Placement
from gyrostat.engine.reconfigure import state_wire
from gyrostat.engine.reconfigure.state_wire import Block, StateWire
from gyrostat.engine.state.flatcopy import copy_into

TIMEOUT = 20.0


def test_a_block_is_released_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pauses: list[float] = []
    shrink = os.ftruncate
    block = Block(200 << 20, shared=True)
    block.memory[:1] = 1

    def note(file: int, size: int) -> None:
        sizes.append(size)
        shrink(file, size)

    monkeypatch.setattr(os, "ftruncate", note)
    monkeypatch.setattr("gyrostat.engine.reconfigure.state_wire.time.sleep", pauses.append)
    block.close(gently=True)
    block.close(gently=True)  # once is enough
    steps = [200 << 20, *sizes]
    parts = {before - after for before, after in zip(steps, sizes, strict=False)}
    assert parts == {(200 << 20) // 64}
    assert sizes[-1] == (200 << 20) // 64  # the last part goes with the mapping
    assert len(pauses) == 63
    assert block.memory[0] == 1


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(0, []), (1, []), (2 << 20, []), (5 << 20, [3 << 20, 1 << 20]), (640 << 20, [630 << 20, 10 << 20])],
)
def test_small_blocks_go_in_few_parts_and_large_ones_in_large(size: int, sizes: list[int]) -> None:
    found = list(state_wire._smaller_and_smaller(size))
    assert [*found[:1], *found[-1:]] == sizes
    assert len(found) < 64


def test_newcomers_do_not_keep_blocks_that_are_used_once(tmp_path: Path) -> None:
    plan = NextGeneration(
        generation=2,
        placement=Placement.even(2, 2),
        members=(0, 1),
        newcomers=(1,),
        donor=0,
        store=str(tmp_path / "store"),
    )
    held: list[list[int]] = []
    sums: list[float] = []

    def follow() -> None:
        mine = StateWire(plan, 1, TIMEOUT)
        for _ in range(3):
            received = mine.receive()
            sums.append(received.state["x"].sum().item())
            received.acknowledge()
            held.append(sorted(mine._maps))
        mine.close()

    newcomer = threading.Thread(target=follow)
    newcomer.start()
    donor = StateWire(plan, 0, TIMEOUT)
    flat, _ = donor.pack({"x": torch.ones(1000)})
    size = 4096
    once, again = donor.make_block(size, once=True), donor.make_block(size)
    for block in (once, again, again):
        donor.send_and_wait(copy_into(block.memory, flat), block)
    newcomer.join(TIMEOUT)
    assert sums == [1000.0] * 3
    assert held == [[], [again.number], [again.number]]
    donor.close()

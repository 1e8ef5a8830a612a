"""Exactly once under any schedule: random deaths of workers and servers, moves, checkpoints and roll-backs.

The full number of schedules runs with `-m full`. Every run ends when all samples of all epochs are reported; then every
slot must contain every batch once.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.ps.protocol.coordinator import ServerRecovery
from gyrostat.ps.store.ledger import Flags, Slots, UpdateLedger
from tests.ps.simulation import WIDTH, World

RECOVERIES = list(ServerRecovery)
schedules = st.tuples(
    st.sampled_from(RECOVERIES), st.integers(0, 2**32), st.integers(0, 30), st.integers(4, 40)
)


def run(recovery: ServerRecovery, seed: int, faults: int, every: int) -> World:
    """A schedule: `faults` faults, one in about `every` steps, then none until the end."""
    choose = random.Random(seed)
    world = World(recovery)
    steps = 0
    while not world.finished:
        steps += 1
        assert steps < 20_000, "no progress"
        if faults and choose.randrange(every) == 0:
            faults -= 1
            choose.choice(world.faults())()
            continue
        choices = world.choices()
        assert choices, "nothing can happen"
        choose.choice(choices)()
    while not world.coordinator.settled:
        deliveries = world.deliveries()
        assert deliveries, "servers do not settle"
        choose.choice(deliveries)()
    return world


def once(world: World) -> bool:
    ones = [1.0] * WIDTH
    return all(content == (ones, ones) for content in world.contents().values())


@settings(max_examples=300)
@given(schedules)
def test_every_batch_is_applied_once(schedule: tuple[ServerRecovery, int, int, int]) -> None:
    assert once(run(*schedule))


@pytest.mark.full
@settings(max_examples=12_000)
@given(schedules)
def test_every_batch_is_applied_once_in_many_schedules(
    schedule: tuple[ServerRecovery, int, int, int],
) -> None:
    assert once(run(*schedule))


def test_without_bitmaps_it_is_not_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would notice."""

    def nothing(self: UpdateLedger, slots: Slots, *_: int) -> Flags:
        return np.zeros(len(slots), bool)

    monkeypatch.setattr(UpdateLedger, "applied", nothing)
    for recovery in RECOVERIES:
        wrong = sum(not once(run(recovery, seed, 30, 15)) for seed in range(10))
        assert wrong >= 3, recovery


def test_schedules_reach_every_event() -> None:
    """Every message, refusal and fault occurs: the schedules above do not pass because nothing happens in them."""
    reached: Counter[str] = Counter()
    for recovery in RECOVERIES:
        for seed in range(40):
            reached.update(run(recovery, seed, 20, 8).counts)
    assert {
        "AHEAD",
        "AssumeTerm",
        "CancelMove",
        "DONE",
        "DropSlot",
        "ForgetEpochs",
        "MOVED",
        "MoveSlot",
        "OwnSlots",
        "STALE",
        "SaveSlot",
        "SetMirror",
        "WITHOUT_VALUES",
        "batches skipped",
        "reports accepted",
        "reports refused",
        "server deaths",
        "server leaves",
        "worker deaths",
    } <= reached.keys()

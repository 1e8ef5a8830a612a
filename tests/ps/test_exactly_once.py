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
from gyrostat.ps.store.slot_store import SlotStore, Update
from tests.ps.simulation import BATCHES, WIDTH, World, reference

RECOVERIES = list(ServerRecovery)
IN_ORDER = [ServerRecovery.EXACT, ServerRecovery.REPLICA]
"""Slots of an ordered job do not go back alone."""
REFERENCE = reference()
KINDS: list[tuple[ServerRecovery, int | None]] = [
    *[(recovery, None) for recovery in RECOVERIES],
    *[(recovery, staleness) for recovery in IN_ORDER for staleness in (0, 1, 3)],
]
Kind = tuple[ServerRecovery, int | None]
seeds_and_faults = st.tuples(st.integers(0, 2**32), st.integers(0, 30), st.integers(4, 40), st.booleans())


def run(kind: Kind, seed: int, faults: int, every: int, only_workers: bool = False) -> World:
    """A schedule: `faults` faults, one in about `every` steps, then none until the end. `only_workers`: servers stay."""
    choose = random.Random(seed)
    world = World(*kind)
    steps = 0
    while not world.finished:
        steps += 1
        assert steps < 20_000, "no progress"
        if faults and choose.randrange(every) == 0:
            faults -= 1
            choose.choice(world.worker_faults() if only_workers else world.faults())()
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
    """Every batch is in every slot once; with staleness 0, the bits are those of a run without faults in one process."""
    if world.staleness == 0:
        return world.contents() == REFERENCE
    ones = [1.0] * WIDTH
    if world.staleness is not None:
        order = world.spec.order
        assert order is not None
        ones = [1 / order.size(order.place(*divmod(place, BATCHES))[0]) for place in range(WIDTH)]
    return all(content == (ones, ones) for content in world.contents().values())


@settings(max_examples=300)
@given(st.sampled_from(KINDS), seeds_and_faults)
def test_every_batch_is_applied_once(kind: Kind, schedule: tuple[int, int, int, bool]) -> None:
    assert once(run(kind, *schedule))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
@settings(max_examples=1300)
@given(seeds_and_faults)
def test_every_batch_is_applied_once_in_many_schedules(
    kind: Kind, schedule: tuple[int, int, int, bool]
) -> None:
    """11,700 schedules."""
    assert once(run(kind, *schedule))


def test_without_bitmaps_it_is_not_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would notice."""

    def nothing(self: UpdateLedger, slots: Slots, *_: int) -> Flags:
        return np.zeros(len(slots), bool)

    monkeypatch.setattr(UpdateLedger, "applied", nothing)
    for recovery in RECOVERIES:
        wrong = sum(not once(run((recovery, None), seed, 30, 15)) for seed in range(10))
        assert wrong >= 3, recovery


def test_steps_that_are_applied_before_they_are_committed_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a slot applied a step as soon as it has all of it, a batch that is trained again would see other parameters."""
    kept = SlotStore.apply

    def eager(self: SlotStore, update: Update) -> Flags:
        new = kept(self, update)
        assert self.spec.order is not None
        self.commit(update.slots, self.spec.order.place(update.epoch, update.batch)[0] + 1)
        return new

    monkeypatch.setattr(SlotStore, "apply", eager)
    wrong = sum(not once(run((ServerRecovery.EXACT, 0), seed, 60, 12, True)) for seed in range(20))
    assert wrong >= 3


def test_schedules_reach_every_event() -> None:
    """Every message, refusal and fault occurs: the schedules above do not pass because nothing happens in them."""
    reached: Counter[str] = Counter()
    for kind in KINDS:
        for seed in range(20):
            reached.update(run(kind, seed, 20, 8).counts)
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
        "served in part",
        "server leaves",
        "waits",
        "worker deaths",
    } <= reached.keys()

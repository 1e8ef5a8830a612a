"""Ordered jobs in the store: steps are applied whole, in order, with gradients in the order of ranks; their state travels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gyrostat.core.errors import MalformedState
from gyrostat.ps.store.hashing import keys_of
from gyrostat.ps.store.optimizers import SGD
from gyrostat.ps.store.slot_state import parse_slot_state
from gyrostat.ps.store.slot_store import SlotStore, Update
from gyrostat.ps.store.spec import DenseSpec, StepOrder, StoreSpec, TableSpec

SLOTS = 4
ALL = np.arange(SLOTS)
ORDER = StepOrder(staleness=0, virtual_workers=3, batches=7)
SPEC = StoreSpec(
    slots=SLOTS,
    tables=(TableSpec(name="items", width=2, optimizer=SGD(lr=1.0), initial_scale=0.0),),
    dense=(DenseSpec(name="model", size=SLOTS, optimizer=SGD(lr=1.0)),),
    order=ORDER,
)
KEYS = keys_of(np.arange(20), "items")


def _store() -> SlotStore:
    store = SlotStore(SPEC)
    store.own(range(SLOTS))
    store.begin_dense(0, ALL, np.zeros((SLOTS, 1), np.float32))
    return store


def _update(batch: int, epoch: int = 0) -> Update:
    random = np.random.default_rng((epoch, batch))
    rows = random.standard_normal((20, 2)).astype(np.float32)
    return Update(
        epoch, batch, ALL, {0: (KEYS, rows)}, {0: random.standard_normal((SLOTS, 1)).astype(np.float32)}
    )


def test_places_of_batches() -> None:
    assert [ORDER.place(0, batch) for batch in (0, 2, 3, 6)] == [(0, 0), (0, 2), (1, 0), (2, 0)]
    assert ORDER.place(1, 0) == (3, 0)
    assert [ORDER.size(step) for step in range(6)] == [3, 3, 1, 3, 3, 1]


def test_a_step_is_applied_whole_in_the_order_of_ranks() -> None:
    one, other = _store(), _store()
    for store, batches in ((one, (0, 1, 2)), (other, (2, 0, 1))):
        for batch in batches:
            assert store.apply(_update(batch)).all()
            assert not store.apply(_update(batch)).any()
            assert not store.pull_dense(0, ALL).any()
        assert store.commit(ALL, 1)
        assert store.ledger.versions.tolist() == [1] * SLOTS
    third = np.float32(1 / 3)
    gradients = [_update(batch).dense[0] * third for batch in range(3)]
    assert np.array_equal(one.pull_dense(0, ALL), -(gradients[0] + gradients[1] + gradients[2]))
    assert all(one.digest(slot) == other.digest(slot) for slot in range(SLOTS))


def test_steps_that_are_not_whole_are_not_applied() -> None:
    store = _store()
    for batch in (0, 1, 3, 4, 5):
        store.apply(_update(batch))
    assert not store.commit(ALL, 2)
    assert not store.pull_dense(0, ALL).any()
    store.apply(_update(2))
    assert store.commit(ALL, 2)
    store.apply(_update(6))  # the last step of the epoch has one batch
    assert store.commit(ALL, 3)
    assert store.ledger.versions.tolist() == [3] * SLOTS


def test_what_waits_travels_with_its_slot() -> None:
    whole, source, target = _store(), _store(), SlotStore(SPEC)
    for batch in (0, 1, 3):
        whole.apply(_update(batch))
        source.apply(_update(batch))
    for slot in (1, 2):
        target.restore(parse_slot_state(b"".join(source.to_state(slot).parts())))
        source.remove([slot])
    whole.apply(_update(2))
    for store in (source, target):
        here = np.array(store.slots)
        update = _update(2)
        store.apply(replace(update, slots=here, dense={0: update.dense[0][here]}))
        assert store.commit(here, 1)
    assert whole.commit(ALL, 1)
    assert all(store.digest(slot) == whole.digest(slot) for store in (source, target) for slot in store.slots)


def test_states_that_do_not_fit_are_refused() -> None:
    store = _store()
    store.apply(_update(0))
    good = store.to_state(1)
    prefix = "pending.0.0.table.items"
    for name, array in (
        (f"{prefix}.rows", np.zeros((3, 5), np.float32)),
        (f"{prefix}.rows", good.arrays[f"{prefix}.rows"][:-1]),
        (f"{prefix}.keys", good.arrays[f"{prefix}.keys"] ^ np.uint64(1 << 63)),
        ("pending.0.0.dense.model", np.zeros(2, np.float32)),
        ("pending.0.x", np.zeros(0, np.uint8)),
        ("pending.0.0.table.others.rows", np.zeros((1, 2), np.float32)),
    ):
        with pytest.raises(MalformedState):
            SlotStore(SPEC).restore(replace(good, arrays={**good.arrays, name: array}))

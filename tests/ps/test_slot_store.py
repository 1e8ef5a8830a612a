"""`SlotStore`: applied once, digests by content, slots that move, states that are refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.errors import MalformedState
from gyrostat.ps.store.hashing import keys_of
from gyrostat.ps.store.ledger import UpdateLedger
from gyrostat.ps.store.optimizers import SGD, Adam, RowAdagrad
from gyrostat.ps.store.slot_state import SlotState, parse_slot_state
from gyrostat.ps.store.slot_store import SlotStore, Update
from gyrostat.ps.store.spec import DenseSpec, StoreSpec, TableSpec

SLOTS = 8
ALL = np.arange(SLOTS)
SPEC = StoreSpec(
    slots=SLOTS,
    tables=(
        TableSpec(name="items", width=4, optimizer=RowAdagrad(lr=0.1)),
        TableSpec(name="words", width=3, optimizer=SGD(lr=0.1, momentum=0.5), enter_after=2, expire_after=6),
    ),
    dense=(DenseSpec(name="model", size=30, optimizer=Adam(lr=0.1)),),
)


def _store(slots: list[int] | None = None) -> SlotStore:
    store = SlotStore(SPEC)
    store.own(range(SLOTS) if slots is None else slots)
    here = np.array(store.slots)
    store.begin_dense(0, here, np.ones((len(here), 4), np.float32))
    return store


def _update(batch: int, slots: np.ndarray = ALL, epoch: int = 0) -> Update:
    random = np.random.default_rng((epoch, batch))
    rows = {
        table: (
            keys_of(random.integers(0, 40, 25), spec.name),
            random.standard_normal((25, spec.width)).astype(np.float32),
        )
        for table, spec in enumerate(SPEC.tables)
    }
    dense = random.standard_normal((SLOTS, 4)).astype(np.float32)[slots]
    return Update(epoch, batch, slots, rows, {0: dense})


def _digests(*stores: SlotStore) -> dict[int, str]:
    return {slot: store.digest(slot) for store in stores for slot in store.slots}


def test_a_duplicate_changes_nothing() -> None:
    store = _store()
    assert store.apply(_update(0)).all()
    before = _digests(store)
    assert not store.apply(_update(0)).any()
    assert _digests(store) == before
    assert store.ledger.versions.tolist() == [1] * SLOTS


def test_slots_apply_what_they_do_not_have() -> None:
    store, all_at_once = _store(), _store()
    some = np.array([1, 4, 5])
    assert store.apply(_update(0, some)).all()
    assert store.apply(_update(0)).tolist() == [slot not in (1, 4, 5) for slot in range(SLOTS)]
    all_at_once.apply(_update(0))
    assert _digests(store) == _digests(all_at_once)


def test_the_same_bits_on_any_division_into_processes() -> None:
    """One process with all slots, and three with some each that swap slots while it goes on."""
    one, several = _store(), [_store([0, 1, 2, 3]), _store([4, 5]), _store([6, 7])]
    for batch in range(30):
        one.apply(_update(batch))
        for store in several:
            if store.slots:
                store.apply(_update(batch, np.array(store.slots)))
        source, target = several[batch % 3], several[(batch + 1) % 3]
        if source.slots:
            state = source.to_state(source.slots[0])
            source.remove([state.slot])
            target.restore(parse_slot_state(b"".join(state.parts())))
    assert _digests(*several) == _digests(one)
    keys = keys_of(np.arange(40), "items")
    assert sorted(slot for store in several for slot in store.slots) == list(range(SLOTS))
    for store in several:
        store.shrink(10_000)
    assert _digests(*several) == _digests(one)
    assert len(one.pull(0, keys)) == 40


def test_the_digest_is_that_of_the_content() -> None:
    """Restored from its state, a store has the digest of the one that computed it, and goes on with the same bits."""
    computed, restored = _store(), SlotStore(SPEC)
    for batch in range(10):
        computed.apply(_update(batch))
    for slot in reversed(range(SLOTS)):
        restored.restore(computed.to_state(slot))
    assert _digests(restored) == _digests(computed)
    computed.apply(_update(99, epoch=1))
    assert _digests(restored) != _digests(computed)
    restored.apply(_update(99, epoch=1))
    assert _digests(restored) == _digests(computed)


def test_a_state_is_a_safetensors_file(tmp_path: Path) -> None:
    store = _store()
    store.apply(_update(3))
    state = store.to_state(2)
    path = tmp_path / "slot.safetensors"
    path.write_bytes(b"".join(state.parts()))
    assert path.stat().st_size == state.nbytes
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == state.arrays.keys()
    for name, array in loaded.items():
        assert (array == state.arrays[name]).all()


def test_states_of_another_job_are_refused_and_change_nothing() -> None:
    store, other = _store(), SlotStore(SPEC)
    for batch in range(4):
        store.apply(_update(batch))
    good = store.to_state(1)

    def altered(name: str, array: np.ndarray | None) -> SlotState:
        arrays = dict(good.arrays)
        if array is None:
            del arrays[name]
        else:
            arrays[name] = array
        return replace(good, arrays=arrays)

    rows, keys = good.arrays["table.items.rows"], good.arrays["table.items.keys"]
    for bad in (
        replace(good, slots=16),
        altered("table.items.rows", rows[:, :3]),
        altered("table.items.rows", rows[:-1]),
        altered("table.items.rows", None),
        altered("table.items.keys", keys[::-1]),
        altered("table.items.keys", keys ^ np.uint64(1 << 63)),
        altered("table.others.rows", rows),
        altered("applied.x", good.arrays["applied.0"]),
        altered("dense.model.values", np.zeros(5, np.float32)),
    ):
        with pytest.raises(MalformedState):
            other.restore(bad)
        assert other.slots == []
    other.restore(good)
    with pytest.raises(MalformedState, match="in use"):
        other.restore(good)


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_damaged_bytes_are_a_state_or_malformed(garbage: bytes, place: int, value: int) -> None:
    store = _store()
    store.apply(_update(0))
    whole = bytearray(b"".join(store.to_state(0).parts()))
    for data in (garbage, bytes(whole[:place]), bytes([*whole[:place], value, *whole[place + 1 :]])):
        with contextlib.suppress(MalformedState):
            SlotStore(SPEC).restore(parse_slot_state(data))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2000), st.integers(1, 255)), max_size=60))
def test_the_ledger_is_a_set(updates: list[tuple[int, int, int]]) -> None:
    ledger, model = UpdateLedger(SLOTS), [set[tuple[int, int]]() for _ in range(SLOTS)]
    for epoch, batch, mask in updates:
        slots = np.array([slot for slot in range(SLOTS) if mask >> slot & 1])
        held = ledger.applied(slots, epoch, batch)
        assert held.tolist() == [(epoch, batch) in model[slot] for slot in slots]
        ledger.record(slots[~held], epoch, batch)
        ledger.advance(slots[~held])
        for slot in slots.tolist():
            model[slot].add((epoch, batch))
    assert ledger.versions.tolist() == [len(each) for each in model]
    for slot in range(SLOTS):
        other = UpdateLedger(SLOTS)
        other.restore(slot, version=3, forgotten=0, bits=ledger.bits_of(slot).items())
        assert all(other.applied(np.array([slot]), *each)[0] for each in model[slot])
    for epoch in range(3):
        flags = ledger.all_applied(ALL, epoch, 5, 1500)
        assert flags.tolist() == [all((epoch, batch) in each for each in model) for batch in range(5, 1505)]
    ledger.forget(ALL, 2)
    assert ledger.applied(ALL, 1, 77).all()
    assert ledger.all_applied(ALL, 0, 0, 3).all()
    assert ledger.applied(ALL, 2, 77).tolist() == [(2, 77) in each for each in model]

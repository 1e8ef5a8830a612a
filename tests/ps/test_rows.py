"""The hash table of rows against a dictionary: growth, slots that go and come, entry, expiry, memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.ps.store.coalesce import group
from gyrostat.ps.store.hashing import ids_of, keys_of, mix, slot_bounds, slots_of, unmix
from gyrostat.ps.store.key_index import KeyIndex
from gyrostat.ps.store.optimizers import SGD, RowAdagrad
from gyrostat.ps.store.rows import RowTable
from gyrostat.ps.store.spec import TableSpec

SLOTS = 8
ONE = (np.float32(1.0),)


def _spec(**options: object) -> TableSpec:
    return TableSpec(**{"name": "items", "width": 2, "optimizer": SGD(lr=1.0), **options})  # type: ignore[arg-type]


def _table(spec: TableSpec) -> RowTable:
    table = RowTable(spec, SLOTS)
    for slot in range(SLOTS):
        table.own(slot)
    return table


def _push(table: RowTable, ids: list[int], update: int = 1) -> None:
    """A gradient of -1 for each of these ids."""
    keys = keys_of(np.array(ids, np.int64), table.spec.name)
    table.push(keys, np.full((len(ids), 2), -1, np.float32), ONE, np.full(len(ids), update))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_keys_are_a_bijection_of_ids_and_slots_are_their_order(ids: list[int]) -> None:
    given_ids = np.array(ids, np.int64)
    keys = keys_of(given_ids, "items")
    assert ids_of(keys, "items").tolist() == ids
    assert unmix(mix(keys)).tolist() == keys.tolist()
    keys.sort()
    bounds = slot_bounds(keys, SLOTS)
    for slot in range(SLOTS):
        assert (slots_of(keys[bounds[slot] : bounds[slot + 1]], SLOTS) == slot).all()
    assert slots_of(keys, 1).tolist() == [0] * len(ids)


def test_initial_values_do_not_depend_on_order_or_history() -> None:
    spec = _spec(width=5, seed=3, initial_scale=0.5)
    keys = keys_of(np.arange(1000), "items")
    rows = spec.initial(keys)
    assert rows.dtype == np.float32
    assert (spec.initial(keys[::-1])[::-1] == rows).all()
    assert (spec.initial(keys[7:8]) == rows[7]).all()
    assert -0.5 <= rows.min() < -0.49
    assert 0.49 < rows.max() < 0.5
    assert abs(rows.mean()) < 0.02
    assert len(np.unique(rows)) > 4900
    assert (spec.initial(keys_of(np.arange(1000), "users")) != rows).any()
    assert (_spec(width=5, seed=4, initial_scale=0.5).initial(keys) != rows).any()


def test_an_index_splits_segments_and_finds_every_key() -> None:
    index, keys = KeyIndex(SLOTS), mix(np.arange(60_000, dtype=np.uint64))
    index.bind(keys)
    for slot in range(SLOTS):
        index.own(slot)
    for start in range(0, 60_000, 7_000):
        part = np.arange(start, min(start + 7_000, 60_000))
        assert (index.find(keys[part]) == -1).all()
        index.insert(keys[part], part)
        assert (index.find(keys[: part[-1] + 1]) == np.arange(part[-1] + 1)).all()
    assert (np.concatenate([index.rows_of(slot) for slot in range(SLOTS)]).argsort().argsort() >= 0).all()
    gone = index.remove(3)
    assert (slots_of(keys[gone], SLOTS) == 3).all()
    assert (index.find(keys[gone]) == -1).all()
    assert not index.owns(3)
    left = np.setdiff1d(np.arange(60_000), gone)
    assert (index.find(keys[left]) == left).all()
    index.own(3)
    index.insert(keys[gone], gone)
    assert (index.find(keys) == np.arange(60_000)).all()


@settings(max_examples=50)
@given(st.data())
def test_a_table_is_a_dictionary(data: st.DataObject) -> None:
    """Pushes of any ids, slots that leave with their state and come back, memory given back: compared after each."""
    table, counts = _table(_spec(initial_scale=0.0)), dict[int, int]()
    away: dict[int, dict[str, np.ndarray]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["push", "push", "leave", "return", "shrink"])):
            case "push":
                seed, count = data.draw(st.integers(0, 1000)), data.draw(st.sampled_from([1, 50, 3000]))
                ids = np.unique(np.random.default_rng(seed).integers(0, 5000, count))
                owners = slots_of(keys_of(ids, "items"), SLOTS)
                ids = ids[[owner not in away for owner in owners.tolist()]]
                _push(table, ids.tolist())
                for each in ids.tolist():
                    counts[each] = counts.get(each, 0) + 1
            case "leave":
                slot = data.draw(st.integers(0, SLOTS - 1))
                if slot not in away:
                    away[slot] = table.state_of(slot)
                    table.remove(slot)
            case "return":
                if away:
                    slot, state = away.popitem()
                    table.install(slot, state)
            case "shrink":
                table.shrink(data.draw(st.sampled_from([1, 100, 10_000])))
        everything = np.arange(5000)
        owners = slots_of(keys_of(everything, "items"), SLOTS)
        here = np.array([owner not in away for owner in owners.tolist()])
        expected = np.array([counts.get(each, 0) for each in everything.tolist()])
        pulled = table.pull(keys_of(everything[here], "items"))
        assert (pulled[:, 0] == expected[here]).all()
        assert len(table) == (expected[here] > 0).sum()


def test_pulling_makes_no_rows() -> None:
    table = _table(_spec())
    keys = keys_of(np.arange(100), "items")
    assert (table.pull(keys) == table.spec.initial(keys)).all()
    assert len(table) == 0
    _push(table, list(range(50)))
    assert (table.pull(keys)[:50] == table.spec.initial(keys)[:50] + 1).all()
    assert (table.pull(keys)[50:] == table.spec.initial(keys)[50:]).all()
    assert len(table) == 50


def test_a_row_enters_with_its_third_gradient() -> None:
    table = _table(_spec(enter_after=3, initial_scale=0.0))
    keys = keys_of(np.array([1, 2]), "items")
    _push(table, [1, 2])
    _push(table, [1])
    assert len(table) == 0
    state = {slot: table.state_of(slot) for slot in range(SLOTS)}
    other = RowTable(table.spec, SLOTS)
    for slot in range(SLOTS):
        other.install(slot, state[slot])
    for each in (table, other):  # the counts move with their slots
        _push(each, [1, 2])
        assert each.pull(keys)[:, 0].tolist() == [1, 0]
        _push(each, [1, 2])
        assert each.pull(keys)[:, 0].tolist() == [2, 1]


def test_rows_without_gradients_expire_at_multiples_of_their_age() -> None:
    table = _table(_spec(expire_after=10, initial_scale=0.0))
    keys = keys_of(np.array([1, 2]), "items")
    _push(table, [1, 2], update=3)
    _push(table, [2], update=11)
    for update in (10, 11, 19, 20):
        for slot in range(SLOTS):
            table.expire(slot, update)
        assert table.pull(keys)[:, 0].tolist() == ([1, 2] if update < 20 else [0, 2])
    _push(table, [1], update=21)
    assert table.pull(keys)[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("rows", [10_000, 150_000, 270_000])
def test_memory_is_at_most_1_3_of_the_payload(rows: int) -> None:
    table = _table(_spec(width=16, optimizer=RowAdagrad(lr=0.1)))
    for start in range(0, rows, 5000):
        keys = keys_of(np.arange(start, start + 5000), "items")
        table.push(keys, np.ones((5000, 16), np.float32), ONE, np.ones(5000, np.int64))
        if start >= 10_000:
            assert table.nbytes <= 1.3 * table.payload_bytes
    assert table.payload_bytes == rows * (8 + 64 + 4)
    for slot in range(SLOTS // 2):
        table.remove(slot)
    while table.shrink(4096):
        pass
    assert table.nbytes <= 1.3 * table.payload_bytes + rows * 8


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(0, 3))
def test_a_batch_is_grouped_by_key_in_its_own_order(numbers: list[int], shift: int) -> None:
    """Also if keys differ in their lowest bits only, which are not enough to sort them by."""
    keys = np.array(numbers, np.uint64) << np.uint64(20 * shift)
    grouped = group(keys)
    distinct, inverse = np.unique(keys, return_inverse=True)
    assert grouped.keys.tolist() == distinct.tolist()
    assert grouped.inverse.tolist() == inverse.tolist()
    assert grouped.order.tolist() == np.argsort(keys, kind="stable").tolist()

"""`RowTable`: the rows of one table, in the slots that this process owns.

Rows, optimizer state and keys are parallel arrays by row number; `key_index.py` finds the number. Rows that a departed slot or
expiry leaves behind are used again, and `shrink` gives their memory back a few thousand at a time. Pulling never changes
anything: an id that has no row yet has its initial values, so reading does not depend on what others have read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyrostat.ps.store.growing import resize_rows, room_for
from gyrostat.ps.store.hashing import Keys, Rows
from gyrostat.ps.store.key_index import KeyIndex, Numbers
from gyrostat.ps.store.optimizers import Coefficient
from gyrostat.ps.store.spec import TableSpec

Columns = dict[str, NDArray[Any]]


class KeyedRows:
    """Parallel arrays of rows by key: an index, free row numbers, and growth."""

    def __init__(self, slots: int, columns: Columns) -> None:
        """`columns`: arrays without rows, by name."""
        self._index = KeyIndex(slots)
        self._columns: Columns = {"keys": np.zeros(0, np.uint64), **columns}
        self._index.bind(self._columns["keys"])
        self._row_bytes = sum(
            each.dtype.itemsize * int(np.prod(each.shape[1:])) for each in self._columns.values()
        )
        self._size = 0
        """Row numbers from here on have never been used, or were given back."""
        self._free: Numbers = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._size - len(self._free)

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self._columns[column]

    @property
    def payload_bytes(self) -> int:
        return len(self) * self._row_bytes

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._free.nbytes + sum(each.nbytes for each in self._columns.values())

    @property
    def index(self) -> KeyIndex:
        return self._index

    def add(self, keys: Keys) -> Numbers:
        """Row numbers for distinct new keys of slots that are here. The caller fills the other columns."""
        reused, self._free = self._free[: len(keys)], self._free[len(keys) :]
        fresh = len(keys) - len(reused)
        capacity = len(self._columns["keys"])
        room = room_for(self._size + fresh, capacity, self._row_bytes)
        if room != capacity:
            self._resize(room)
        numbers = np.concatenate([reused, np.arange(self._size, self._size + fresh)])
        self._size += fresh
        self._columns["keys"][numbers] = keys
        self._index.insert(keys, numbers)
        return numbers

    def discard(self, slot: int, gone: Numbers) -> None:
        """Remove some rows of a slot."""
        if len(gone):
            self._index.discard(slot, gone)
            self._free = np.concatenate([self._free, gone])

    def remove_slot(self, slot: int) -> None:
        self._free = np.concatenate([self._free, self._index.remove(slot)])

    def state_of(self, slot: int) -> Columns:
        """Copies of a slot's rows, in ascending order of keys: equal content gives equal arrays."""
        numbers = self._index.rows_of(slot)
        numbers = numbers[np.argsort(self._columns["keys"][numbers])]
        return {name: column[numbers] for name, column in self._columns.items()}

    def install(self, slot: int, state: Columns) -> None:
        self._index.own(slot)
        numbers = self.add(state["keys"])
        for name, column in self._columns.items():
            column[numbers] = state[name]

    def shrink(self, most: int) -> int:
        """Give up to `most` free rows back to the system: the last rows move to free numbers. Returns how many."""
        count = min(most, len(self._free))
        if count == 0:
            return 0
        end = self._size - count
        is_free = np.zeros(count, bool)
        is_free[self._free[self._free >= end] - end] = True
        moving = np.flatnonzero(~is_free) + end
        self._free = self._free[self._free < end]
        targets, self._free = self._free[: len(moving)], self._free[len(moving) :]
        self._index.relocate(self._columns["keys"][moving], targets)
        for column in self._columns.values():
            column[targets] = column[moving]
        self._size = end
        if len(self._columns["keys"]) > room_for(end + 1, end, self._row_bytes):
            self._resize(end)
        return count

    def _resize(self, rows: int) -> None:
        for column in self._columns.values():
            resize_rows(column, rows)
        self._index.bind(self._columns["keys"])


class RowTable:
    """One table: rows and their optimizer's state."""

    def __init__(self, spec: TableSpec, slots: int) -> None:
        self.spec = spec
        columns: Columns = {
            "rows": np.zeros((0, spec.width), np.float32),
            "state": np.zeros((0, spec.optimizer.state_width(spec.width)), np.float32),
        }
        if spec.expire_after:
            columns["used"] = np.zeros(0, np.int64)
        self._rows = KeyedRows(slots, columns)
        self._candidates = (
            KeyedRows(slots, {"pushes": np.zeros(0, np.int64)}) if spec.enter_after > 1 else None
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def payload_bytes(self) -> int:
        return sum(part.payload_bytes for part in self._parts())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts())

    def own(self, slot: int) -> None:
        for part in self._parts():
            part.index.own(slot)

    def remove(self, slot: int) -> None:
        for part in self._parts():
            part.remove_slot(slot)

    def shrink(self, most: int) -> int:
        return sum(part.shrink(most) for part in self._parts())

    def pull(self, keys: Keys) -> Rows:
        """The rows of these keys; initial values where there is none."""
        numbers = self._rows.index.find(keys)
        missing = np.flatnonzero(numbers < 0)
        if len(missing) == len(keys):
            return self.spec.initial(keys)
        rows: Rows = np.take(self._rows["rows"], numbers, axis=0, mode="wrap")
        if len(missing):
            rows[missing] = self.spec.initial(keys[missing])
        return rows

    def push(
        self, keys: Keys, gradients: Rows, coefficients: tuple[Coefficient, ...], versions: NDArray[np.int64]
    ) -> None:
        """Apply gradients of distinct keys. `versions`: of each key, the number of this update in its slot."""
        numbers = self._rows.index.find(keys)
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            entering = missing if self._candidates is None else self._admit(keys, missing)
            numbers[entering] = self._enter(keys[entering])
            if len(entering) < len(missing):
                kept = np.flatnonzero(numbers >= 0)
                numbers, gradients, versions = numbers[kept], gradients[kept], versions[kept]
                coefficients = tuple(
                    each[kept] if isinstance(each, np.ndarray) else each for each in coefficients
                )
        rows = np.take(self._rows["rows"], numbers, axis=0)
        state = np.take(self._rows["state"], numbers, axis=0)
        self.spec.optimizer.step(rows, state, gradients, coefficients)
        self._rows["rows"][numbers] = rows
        if state.shape[1]:
            self._rows["state"][numbers] = state
        if self.spec.expire_after:
            self._rows["used"][numbers] = versions

    def expire(self, slot: int, version: int) -> None:
        """Called after update number `version` of a slot."""
        if self.spec.expire_after and version % self.spec.expire_after == 0:
            numbers = self._rows.index.rows_of(slot)
            old = self._rows["used"][numbers] <= version - self.spec.expire_after
            self._rows.discard(slot, numbers[old])

    def state_of(self, slot: int) -> Columns:
        state = self._rows.state_of(slot)
        if self._candidates is not None:
            for name, column in self._candidates.state_of(slot).items():
                state[f"candidates.{name}"] = column
        return state

    def install(self, slot: int, state: Columns) -> None:
        self._rows.install(slot, state)
        if self._candidates is not None:
            self._candidates.install(slot, {name: state[f"candidates.{name}"] for name in ("keys", "pushes")})

    def _parts(self) -> list[KeyedRows]:
        return [self._rows] if self._candidates is None else [self._rows, self._candidates]

    def _enter(self, keys: Keys) -> Numbers:
        numbers = self._rows.add(keys)
        rows = self.spec.initial(keys)
        self._rows["rows"][numbers] = rows
        self._rows["state"][numbers] = self.spec.optimizer.begin(rows)
        return numbers

    def _admit(self, keys: Keys, missing: Numbers) -> Numbers:
        """Count a push of each missing key; returns those that have reached the threshold."""
        assert self._candidates is not None
        numbers = self._candidates.index.find(keys[missing])
        new = np.flatnonzero(numbers < 0)
        numbers[new] = added = self._candidates.add(keys[missing[new]])
        self._candidates["pushes"][added] = 0
        self._candidates["pushes"][numbers] += 1
        return missing[self._candidates["pushes"][numbers] >= self.spec.enter_after]

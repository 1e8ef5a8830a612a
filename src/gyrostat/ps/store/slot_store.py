"""`SlotStore`: the tables, dense pieces and applied updates of the slots that one process owns. One thread, no I/O.

Slots are logical: each has its version and its bitmap, and can be copied, removed and installed on its own; but an
update of all slots of a process is one call of each kernel, because at 64 slots of 80 rows each, calls of NumPy would
cost more than the rows. The result is the same as if every slot were alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyrostat.core.errors import MalformedState
from gyrostat.ps.store.coalesce import coalesce
from gyrostat.ps.store.dense import DensePieces
from gyrostat.ps.store.hashing import Keys, Rows, slots_of
from gyrostat.ps.store.ledger import Slots, UpdateLedger
from gyrostat.ps.store.optimizers import coefficient_columns
from gyrostat.ps.store.pending_steps import PendingSteps
from gyrostat.ps.store.rows import Columns, RowTable
from gyrostat.ps.store.slot_state import SlotState
from gyrostat.ps.store.spec import StoreSpec
from gyrostat.ps.store.update import Update as Update


class SlotStore:
    """Everything that the slots of one process hold."""

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self.ledger = UpdateLedger(spec.slots)
        self._tables = [RowTable(each, spec.slots) for each in spec.tables]
        self._dense = [DensePieces(each, spec.slots) for each in spec.dense]
        self._here = np.zeros(spec.slots, bool)
        self._steps = None if spec.order is None else PendingSteps(spec, spec.order)

    @property
    def slots(self) -> list[int]:
        """The slots that are here."""
        return np.flatnonzero(self._here).tolist()

    @property
    def rows(self) -> int:
        return sum(len(table) for table in self._tables)

    @property
    def payload_bytes(self) -> int:
        """Ids, rows and optimizer state."""
        return sum(table.payload_bytes for table in self._tables) + sum(each.nbytes for each in self._dense)

    @property
    def nbytes(self) -> int:
        """The memory that these take."""
        return sum(table.nbytes for table in self._tables) + sum(each.nbytes for each in self._dense)

    def holds(self, slots: Slots) -> bool:
        return bool(np.all(self._here[slots]))

    # Updates.

    def apply(self, update: Update) -> NDArray[np.bool_]:
        """Apply an update in the slots that do not have it; in an ordered job, keep it until `commit`. Returns which of
        `update.slots` did not have it: for the others it is a duplicate."""
        new = ~self.ledger.applied(update.slots, update.epoch, update.batch)
        if not new.any():
            return new
        slots = update.slots[new]
        dense = {tensor: pieces[new] for tensor, pieces in update.dense.items()}
        self.ledger.record(slots, update.epoch, update.batch)
        if self._steps is None:
            self._change(slots, update.rows, dense)
        else:
            self._steps.add(replace(update, slots=slots, dense=dense))
        return new

    def commit(self, slots: Slots, step: int) -> bool:
        """Of an ordered job: apply all steps before this one. False: some slot lacks batches of them, so that it is not the
        owner any more."""
        if self._steps is None or not len(slots):
            return True
        versions = self.ledger.versions
        for number in range(int(versions[slots].min()), step):
            behind = slots[versions[slots] == number]
            whole = behind[self._steps.has_all(behind, number)]
            if len(whole):
                self._change(whole, *self._steps.take(whole, number))
        return bool(np.all(versions[slots] >= step))

    def _change(self, slots: Slots, rows: Mapping[int, tuple[Keys, Rows]], dense: Mapping[int, Rows]) -> None:
        """One update of these slots. Rows of others are ignored."""
        wanted = np.zeros(self.spec.slots, bool)
        wanted[slots] = True
        numbers = self.ledger.versions + 1
        for table, (keys, gradients) in rows.items():
            keys, gradients = coalesce(keys, gradients)
            owners = slots_of(keys, self.spec.slots)
            mine = wanted[owners]
            if not mine.all():
                keys, gradients, owners = keys[mine], gradients[mine], owners[mine]
            if len(keys):
                versions = numbers[owners]
                columns = coefficient_columns(self._tables[table].spec.optimizer, versions, dense=False)
                self._tables[table].push(keys, gradients, columns, versions)
        for tensor, pieces in dense.items():
            optimizer = self._dense[tensor].spec.optimizer
            self._dense[tensor].push(
                slots, pieces, coefficient_columns(optimizer, numbers[slots], dense=True)
            )
        self.ledger.advance(slots)
        self._expire(slots)

    def pull(self, table: int, keys: Keys) -> Rows:
        """Rows; initial values for ids that have none. Changes nothing."""
        return self._tables[table].pull(keys)

    def pull_dense(self, tensor: int, slots: Slots) -> Rows:
        """One piece per slot. All of them must have values."""
        return self._dense[tensor].pull(slots)

    def has_dense(self, slots: Slots) -> bool:
        """Whether every dense piece of these slots has values."""
        return all(each.has_values(slots) for each in self._dense)

    def begin_dense(self, tensor: int, slots: Slots, values: Rows) -> None:
        """Initial values of dense pieces. Idempotent: a piece that has values keeps them."""
        self._dense[tensor].begin(slots, values)

    # Slots.

    def own(self, slots: Iterable[int]) -> None:
        """Slots that have applied nothing yet."""
        for slot in slots:
            for table in self._tables:
                table.own(slot)
            self._here[slot] = True

    def remove(self, slots: Iterable[int]) -> None:
        for slot in slots:
            for table in self._tables:
                table.remove(slot)
            for dense in self._dense:
                dense.remove(slot)
            if self._steps is not None:
                self._steps.remove(slot)
            self.ledger.clear(slot)
            self._here[slot] = False

    def shrink(self, most: int) -> int:
        """Return the memory of up to `most` removed rows per table to the system. Returns how many."""
        return sum(table.shrink(most) for table in self._tables)

    def to_state(self, slot: int) -> SlotState:
        """A copy of a slot."""
        arrays: Columns = {}
        for table in self._tables:
            arrays |= {f"table.{table.spec.name}.{name}": each for name, each in table.state_of(slot).items()}
        for dense in self._dense:
            arrays |= {f"dense.{dense.spec.name}.{name}": each for name, each in dense.state_of(slot).items()}
        if self._steps is not None:
            arrays |= self._steps.state_of(slot)
        arrays |= {f"applied.{epoch}": bits for epoch, bits in self.ledger.bits_of(slot).items()}
        version, forgotten = int(self.ledger.versions[slot]), int(self.ledger.forgotten[slot])
        return SlotState(slot, self.spec.slots, version, forgotten, arrays)

    def restore(self, state: SlotState) -> None:
        """Install a slot that is not here. A state of another job is refused, and changes nothing."""
        groups = self._checked(state)
        for table in self._tables:
            table.install(state.slot, groups[f"table.{table.spec.name}"])
        for dense in self._dense:
            dense.install(state.slot, groups.get(f"dense.{dense.spec.name}", {}))
        if self._steps is not None:
            self._steps.install(state.slot, state.arrays)
        bits = [(int(epoch), each) for epoch, each in groups.get("applied", {}).items()]
        self.ledger.restore(state.slot, version=state.version, forgotten=state.forgotten, bits=bits)
        self._here[state.slot] = True

    def digest(self, slot: int) -> str:
        """Equal content gives equal digests: neither the order of updates nor former places matter."""
        return self.to_state(slot).digest

    def _expire(self, slots: Slots) -> None:
        for table in self._tables:
            if table.spec.expire_after:
                for slot in slots.tolist():
                    table.expire(slot, int(self.ledger.versions[slot]))

    def _checked(self, state: SlotState) -> dict[str, Columns]:
        if state.slots != self.spec.slots or self._here[state.slot]:
            raise MalformedState(
                f"slot {state.slot} of {state.slots}: here are {self.spec.slots}, and {self.slots} are in use"
            )
        expected, optional = self._known_arrays
        groups: dict[str, Columns] = {}
        for name, array in state.arrays.items():
            group, _, column = name.rpartition(".")
            wanted = optional.get(name)
            if name.startswith("pending.") and self._steps is not None:
                self._steps.check(state.slot, name, array)
                continue
            if group == "applied":
                fits = column.isdigit() and array.dtype == np.uint8 and array.ndim == 1
            elif wanted is None:
                fits = False
            else:
                start = 0 if group.startswith("dense") else 1
                fits = array.dtype == wanted.dtype and array.shape[start:] == wanted.shape[start:]
            if not fits:
                raise MalformedState(
                    f"slot {state.slot} has {name!r} as {array.dtype}{array.shape}, which this job does not"
                )
            groups.setdefault(_group_of(name), {})[_column_of(name)] = array
        missing = expected.keys() - state.arrays.keys()
        if missing:
            raise MalformedState(f"slot {state.slot} has no {sorted(missing)[0]!r}")
        self._check_lengths(state, groups)
        return groups

    @cached_property
    def _known_arrays(self) -> tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]:
        """Of an empty slot: the arrays that every state has, and those that it may have."""
        empty = SlotStore(self.spec)
        empty.own([0])
        expected = empty.to_state(0).arrays
        for tensor, dense in enumerate(self.spec.dense):
            empty.begin_dense(tensor, np.array([0]), np.zeros((1, dense.piece(self.spec.slots)), np.float32))
        return expected, empty.to_state(0).arrays

    def _check_lengths(self, state: SlotState, groups: dict[str, Columns]) -> None:
        for table in self.spec.tables:
            columns = groups[f"table.{table.name}"]
            for prefix in ("", "candidates."):
                parts = {
                    name: each
                    for name, each in columns.items()
                    if name.startswith("candidates.") == bool(prefix)
                }
                keys = parts.get(f"{prefix}keys")
                if keys is None:
                    continue
                if len({len(each) for each in parts.values()}) > 1:
                    raise MalformedState(
                        f"the columns of table {table.name!r} in slot {state.slot} differ in length"
                    )
                if not np.all(keys[1:] > keys[:-1]) or not np.all(slots_of(keys, state.slots) == state.slot):
                    raise MalformedState(
                        f"keys of table {table.name!r} do not belong to slot {state.slot}, or are not sorted"
                    )


def _group_of(name: str) -> str:
    """`table.items` of `table.items.candidates.keys`."""
    group = name.removesuffix(_column_of(name))
    return group.removesuffix(".")


def _column_of(name: str) -> str:
    head, _, column = name.rpartition(".")
    return f"candidates.{column}" if head.endswith(".candidates") and head.startswith("table.") else column

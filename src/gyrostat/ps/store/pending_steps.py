"""`PendingSteps`: gradients of ordered jobs that wait for the other batches of their step, in the slots of one process.

A step is applied as one update: the gradients of its batches are scaled by 1/n and added in the order of virtual ranks, as
DDP on n workers adds them. Updates are kept as they came, for all slots of the process at once; a slot that leaves takes its
part along, as arrays of its state:

    pending.{epoch}.{batch}.table.{name}.keys, …rows    pending.{epoch}.{batch}.dense.{name}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyrostat.core.errors import MalformedState
from gyrostat.ps.store.hashing import Keys, Rows, slots_of
from gyrostat.ps.store.ledger import Flags, Slots
from gyrostat.ps.store.spec import StepOrder, StoreSpec
from gyrostat.ps.store.update import Update

Arrays = dict[str, NDArray[Any]]


class PendingSteps:
    """What has been pushed and not been committed."""

    def __init__(self, spec: StoreSpec, order: StepOrder) -> None:
        self._spec, self._order = spec, order
        self._updates: dict[int, dict[int, list[Update]]] = {}
        """By step and virtual rank: parts, each for slots that no other part has."""

    def add(self, update: Update) -> None:
        """Keep an update, for slots that do not have it."""
        step, rank = self._order.place(update.epoch, update.batch)
        self._updates.setdefault(step, {}).setdefault(rank, []).append(update)

    def has_all(self, slots: Slots, step: int) -> Flags:
        """Of each slot, whether all batches of the step are here."""
        found = np.zeros(self._spec.slots, np.int64)
        for parts in self._updates.get(step, {}).values():
            for part in parts:
                found[part.slots] += 1
        complete: Flags = found[slots] == self._order.size(step)
        return complete

    def take(self, slots: Slots, step: int) -> tuple[dict[int, tuple[Keys, Rows]], dict[int, Rows]]:
        """The mean gradients of a step in these slots, which have all of it; they are not kept any longer."""
        scale = np.float32(1 / self._order.size(step))
        by_rank = self._updates[step]
        rows: dict[int, tuple[list[Keys], list[Rows]]] = {}
        dense: dict[int, Rows] = {}
        places = np.zeros(self._spec.slots, np.int64)
        places[slots] = np.arange(len(slots))
        for number, rank in enumerate(sorted(by_rank)):
            for part in by_rank[rank]:
                mine = np.isin(part.slots, slots)
                for table in part.rows:
                    keys, gradients = self._rows_in(part, table, slots)
                    lists = rows.setdefault(table, ([], []))
                    lists[0].append(keys)
                    lists[1].append(gradients * scale)
                for tensor, pieces in part.dense.items():
                    total = dense.setdefault(tensor, np.zeros((len(slots), pieces.shape[1]), np.float32))
                    where, scaled = places[part.slots[mine]], pieces[mine] * scale
                    total[where] = total[where] + scaled if number else scaled  # 0 + -0.0 would be 0.0
        self._forget(slots, step)
        return {
            table: (np.concatenate(keys), np.concatenate(gradients))
            for table, (keys, gradients) in rows.items()
        }, dense

    def remove(self, slot: int) -> None:
        for step in list(self._updates):
            self._forget(np.array([slot]), step)

    # One slot, as arrays.

    def state_of(self, slot: int) -> Arrays:
        arrays: Arrays = {}
        for by_rank in self._updates.values():
            for part in (part for parts in by_rank.values() for part in parts):
                place = np.flatnonzero(part.slots == slot)
                if not len(place):
                    continue
                prefix = f"pending.{part.epoch}.{part.batch}"
                for table in range(len(self._spec.tables)):
                    keys, rows = self._rows_in(part, table, np.array([slot]))
                    name = f"{prefix}.table.{self._spec.tables[table].name}"
                    arrays |= {f"{name}.keys": keys.copy(), f"{name}.rows": rows.copy()}
                for tensor, pieces in part.dense.items():
                    arrays[f"{prefix}.dense.{self._spec.dense[tensor].name}"] = pieces[place[0]].copy()
                arrays[prefix] = np.zeros(0, np.uint8)
        return arrays

    def check(self, slot: int, name: str, array: NDArray[Any]) -> None:
        """Raise `MalformedState` unless this array of a state can be one of a pending update."""
        _, *numbers = name.split(".")
        widths = {f"table.{each.name}.rows": (each.width, 2) for each in self._spec.tables}
        keys = {f"table.{each.name}.keys" for each in self._spec.tables}
        pieces = {f"dense.{each.name}": each.piece(self._spec.slots) for each in self._spec.dense}
        rest = ".".join(numbers[2:])
        fits = len(numbers) >= 2 and all(each.isdigit() for each in numbers[:2])
        if rest in widths:
            fits &= array.dtype == np.float32 and array.ndim == 2 and array.shape[1] == widths[rest][0]
        elif rest in keys:
            fits &= array.dtype == np.uint64 and array.ndim == 1
            fits = fits and bool(np.all(slots_of(array, self._spec.slots) == slot))
        elif rest in pieces:
            fits &= array.dtype == np.float32 and array.shape == (pieces[rest],)
        else:
            fits &= rest == ""
        if not fits:
            raise MalformedState(
                f"slot {slot} has {name!r} as {array.dtype}{array.shape}, which this job does not"
            )

    def install(self, slot: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """The inverse of `state_of`, of arrays that `check` has accepted."""
        for name in arrays:
            _, *numbers = name.split(".")
            if not name.startswith("pending.") or len(numbers) != 2:
                continue
            rows = {}
            for table, spec in enumerate(self._spec.tables):
                keys = arrays.get(f"{name}.table.{spec.name}.keys")
                gradients = arrays.get(f"{name}.table.{spec.name}.rows")
                if keys is None or gradients is None or len(keys) != len(gradients):
                    raise MalformedState(f"slot {slot}: {name} lacks gradients of table {spec.name!r}")
                if len(keys):
                    rows[table] = keys, gradients
            dense = {
                tensor: arrays[f"{name}.dense.{spec.name}"][None]
                for tensor, spec in enumerate(self._spec.dense)
                if f"{name}.dense.{spec.name}" in arrays
            }
            self.add(Update(int(numbers[0]), int(numbers[1]), np.array([slot]), rows, dense))

    def _rows_in(self, part: Update, table: int, slots: Slots) -> tuple[Keys, Rows]:
        if table not in part.rows:
            return np.zeros(0, np.uint64), np.zeros((0, self._spec.tables[table].width), np.float32)
        keys, gradients = part.rows[table]
        wanted = np.zeros((2, self._spec.slots), bool)
        wanted[0, slots] = wanted[1, part.slots] = True
        mine = (wanted[0] & wanted[1])[slots_of(keys, self._spec.slots)]
        return keys[mine], gradients[mine]

    def _forget(self, slots: Slots, step: int) -> None:
        by_rank = self._updates.get(step, {})
        for rank, parts in list(by_rank.items()):
            left = []
            for part in parts:
                keep = ~np.isin(part.slots, slots)
                if keep.all():
                    left.append(part)
                elif keep.any():
                    dense = {tensor: pieces[keep] for tensor, pieces in part.dense.items()}
                    left.append(
                        Update(part.epoch, part.batch, part.slots[keep], part.rows, dense, part.origin)
                    )
            by_rank[rank] = left
            if not left:
                del by_rank[rank]
        if not by_rank:
            self._updates.pop(step, None)

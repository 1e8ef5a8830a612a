"""`DensePieces`: a dense tensor, cut into one piece per slot, of which this process holds those of its slots.

The pieces are the rows of one array, so that an update of all of them is one call of the optimizer's kernel. A piece has
no values until a worker brings them: all workers hold the same ones, and the first to come sets them.
"""

from __future__ import annotations

import numpy as np

from gyrostat.ps.store.hashing import Rows
from gyrostat.ps.store.ledger import Slots
from gyrostat.ps.store.optimizers import Coefficient
from gyrostat.ps.store.rows import Columns
from gyrostat.ps.store.spec import DenseSpec


class DensePieces:
    """The pieces of one tensor."""

    def __init__(self, spec: DenseSpec, slots: int) -> None:
        self.spec, self._slots = spec, slots
        self._width = spec.piece(slots)
        self._values = np.zeros((0, self._width), np.float32)
        self._state = np.zeros((0, spec.optimizer.state_width(self._width)), np.float32)
        self._numbers = np.full(slots, -1, np.int64)
        """Of each slot, its row; -1: it has no values yet, or is elsewhere."""

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._state.nbytes

    def has_values(self, slots: Slots) -> bool:
        return bool(np.all(self._numbers[slots] >= 0))

    def begin(self, slots: Slots, values: Rows) -> None:
        """Initial values of pieces; those that have values keep them."""
        new = np.flatnonzero(self._numbers[slots] < 0)
        if len(new):
            self._append(slots[new], values[new], self.spec.optimizer.begin(values[new]))

    def pull(self, slots: Slots) -> Rows:
        pieces: Rows = np.take(self._values, self._numbers[slots], axis=0)
        return pieces

    def push(self, slots: Slots, gradients: Rows, coefficients: tuple[Coefficient, ...]) -> None:
        numbers = self._numbers[slots]
        values, state = np.take(self._values, numbers, axis=0), np.take(self._state, numbers, axis=0)
        self.spec.optimizer.step(values, state, gradients, coefficients)
        self._values[numbers] = values
        self._state[numbers] = state

    def remove(self, slot: int) -> None:
        number = int(self._numbers[slot])
        if number >= 0:
            self._values, self._state = np.delete(self._values, number, 0), np.delete(self._state, number, 0)
            self._numbers[self._numbers > number] -= 1
            self._numbers[slot] = -1

    def state_of(self, slot: int) -> Columns:
        """Nothing, if the piece has no values yet."""
        number = int(self._numbers[slot])
        if number < 0:
            return {}
        return {"values": self._values[number].copy(), "state": self._state[number].copy()}

    def install(self, slot: int, state: Columns) -> None:
        if state:
            self._append(np.array([slot]), state["values"][None], state["state"][None])

    def _append(self, slots: Slots, values: Rows, state: Rows) -> None:
        self._numbers[slots] = np.arange(len(self._values), len(self._values) + len(slots))
        self._values = np.concatenate([self._values, values])
        self._state = np.concatenate([self._state, state])

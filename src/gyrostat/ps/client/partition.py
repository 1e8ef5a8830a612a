"""The part of an exchange that one server gets, and the values of all servers put together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyrostat.ps.client.port import Pull, PulledValues, WholeUpdate
from gyrostat.ps.protocol.exchange import BatchRange, Exchange, ExchangeReply
from gyrostat.ps.store.hashing import Keys, Rows, slots_of
from gyrostat.ps.store.ledger import Flags, Slots, Versions
from gyrostat.ps.store.slot_store import Update
from gyrostat.ps.store.spec import StoreSpec

Places = NDArray[np.int64]


@dataclass(frozen=True)
class WholeExchange:
    """An exchange with all slots."""

    term: int
    push: WholeUpdate | None
    pull: Pull
    batches: BatchRange | None
    begin: Mapping[int, Rows]
    committed: int


@dataclass(frozen=True)
class SlotPart:
    """An exchange for some slots."""

    exchange: Exchange

    @staticmethod
    def of(spec: StoreSpec, whole: WholeExchange, slots: Sequence[int]) -> SlotPart:
        push, pull = whole.push, whole.pull
        numbers = np.array(slots, np.int64)
        everything = len(slots) == spec.slots
        mine = np.zeros(spec.slots, bool)
        mine[numbers] = True

        def places_of(keys: Keys) -> Places:
            return np.flatnonzero(mine[slots_of(keys, spec.slots)])

        def pieces(dense: Mapping[int, Rows]) -> Mapping[int, Rows]:
            return dense if everything else {tensor: each[numbers] for tensor, each in dense.items()}

        update = None
        if push is not None:
            rows = push.rows
            if not everything:
                places = {table: places_of(keys) for table, (keys, _) in rows.items()}
                rows = {
                    table: (keys[places[table]], np.take(gradients, places[table], axis=0))
                    for table, (keys, gradients) in rows.items()
                }
            batch = push.batch
            update = Update(batch.epoch, batch.number, numbers, rows, pieces(push.dense), push.origin)
        pulled = pull.rows
        if not everything:
            pulled = {table: keys[places_of(keys)] for table, keys in pulled.items()}
        exchange = Exchange(
            whole.term,
            numbers,
            update,
            pulled,
            pull.dense,
            pieces(whole.begin),
            whole.batches,
            committed=whole.committed,
        )
        return SlotPart(exchange)


class Gathered:
    """The values of all slots."""

    def __init__(self, spec: StoreSpec, pull: Pull) -> None:
        self._spec, self._pull = spec, pull
        self._rows: dict[int, Rows] = {}
        self._dense: dict[int, Rows] = {}
        self._applied: Flags | None = None
        self._duplicates = 0
        self._versions: Versions = np.zeros(spec.slots if spec.record else 0, np.int64)

    def take(self, part: SlotPart, reply: ExchangeReply) -> None:
        slots: Slots = reply.served if len(reply.served) else part.exchange.slots
        self._duplicates += reply.duplicates
        if len(self._versions):
            self._versions[slots] = reply.versions
        if part.exchange.which_applied is not None:
            self._applied = reply.applied if self._applied is None else self._applied & reply.applied
        if len(slots) == self._spec.slots:
            self._rows, self._dense = dict(reply.rows), dict(reply.dense)
            return
        mine = np.zeros(self._spec.slots, bool)
        mine[slots] = True
        for table, rows in reply.rows.items():
            keys = self._pull.rows[table]
            if table not in self._rows:
                self._rows[table] = np.empty((len(keys), self._spec.tables[table].width), np.float32)
            self._rows[table][np.flatnonzero(mine[slots_of(keys, self._spec.slots)])] = rows
        for tensor, pieces in reply.dense.items():
            if tensor not in self._dense:
                shape = self._spec.slots, self._spec.dense[tensor].piece(self._spec.slots)
                self._dense[tensor] = np.empty(shape, np.float32)
            self._dense[tensor][slots] = pieces

    def values(self) -> PulledValues:
        return PulledValues(self._rows, self._dense, self._duplicates, self._versions)

    def applied(self, count: int) -> Flags:
        return np.zeros(count, bool) if self._applied is None else self._applied

"""Exchanges and slots as frames: a few numbers, then arrays as they are in memory.

The shape of every array follows from the numbers and the job's `StoreSpec`, and all of them together must have exactly the
size of the frame: nothing in a frame can make its reader take memory beyond that. Arrays of a decoded frame are views of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from gyrostat.core.errors import MalformedState
from gyrostat.ps.protocol.exchange import BatchRange, Exchange, ExchangeReply, ExchangeStatus
from gyrostat.ps.protocol.messages import SlotRole
from gyrostat.ps.protocol.slot_server import SlotCopy
from gyrostat.ps.store.hashing import Keys, Rows
from gyrostat.ps.store.slot_state import parse_slot_state
from gyrostat.ps.store.slot_store import Update
from gyrostat.ps.store.spec import StoreSpec
from gyrostat.ps.wire.frames import MalformedFrame, PsFrame

Encoded = tuple[bytes, list[memoryview]]
_Counts = tuple[tuple[int, int], ...]
"""(number of the table, rows)"""
_MOST_BATCH = 1 << 40
_ALIGN = 8


class _ExchangeNumbers(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """Of the request or forward, to be repeated in the reply."""
    term: int
    slots: int
    batch: tuple[int, int] | None
    """Epoch and number of the pushed update."""
    push_rows: _Counts
    push_dense: tuple[int, ...]
    pull_rows: _Counts
    pull_dense: tuple[int, ...]
    begin_dense: tuple[int, ...]
    which_applied: tuple[int, int, int] | None
    committed: int
    origin: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class _ReplyNumbers(msgspec.Struct, frozen=True, array_like=True):
    number: int
    status: ExchangeStatus
    slots: int
    rows: _Counts
    dense: tuple[int, ...]
    applied: int
    duplicates: int
    versions: int
    served: int


class _CopyNumbers(msgspec.Struct, frozen=True, array_like=True):
    role: SlotRole
    number: int
    term: int


class ExchangeCodec:
    """Of one job: encodes and decodes what its workers and servers exchange."""

    def __init__(self, spec: StoreSpec, batches: int = _MOST_BATCH) -> None:
        """`batches`: per epoch; larger numbers are refused, since they would make bitmaps of any size."""
        self._spec, self._batches = spec, batches
        self._widths = [table.width for table in spec.tables]
        self._pieces = [dense.piece(spec.slots) for dense in spec.dense]
        self._exchange = msgspec.msgpack.Decoder(_ExchangeNumbers)
        self._reply = msgspec.msgpack.Decoder(_ReplyNumbers)
        self._copy = msgspec.msgpack.Decoder(_CopyNumbers)

    # Exchanges.

    def encode_exchange(self, number: int, exchange: Exchange) -> Encoded:
        push, asked = exchange.push, exchange.which_applied
        numbers = _ExchangeNumbers(
            number,
            exchange.term,
            len(exchange.slots),
            None if push is None else (push.epoch, push.batch),
            () if push is None else tuple((table, len(keys)) for table, (keys, _) in push.rows.items()),
            () if push is None else tuple(push.dense),
            _counts(exchange.pull_rows),
            exchange.pull_dense,
            tuple(exchange.begin_dense),
            None if asked is None else (asked.epoch, asked.first, asked.count),
            exchange.committed,
            b"" if push is None else push.origin,
        )
        arrays: list[NDArray[Any]] = [exchange.slots]
        if push is not None:
            arrays += [each for pair in push.rows.values() for each in pair]
            arrays += push.dense.values()
        arrays += exchange.pull_rows.values()
        arrays += exchange.begin_dense.values()
        return msgspec.msgpack.encode(numbers), _padded(arrays)

    def decode_exchange(self, frame: PsFrame) -> tuple[int, Exchange]:
        """The number of the request, and the exchange."""
        numbers = self._exchange.decode(frame.numbers)
        self._check_names(numbers.push_rows, numbers.push_dense)
        self._check_names(numbers.pull_rows, numbers.pull_dense)
        self._check_names((), numbers.begin_dense)
        arrays = _Arrays(frame.arrays)
        slots = arrays.take(np.int64, numbers.slots)
        if not self._are_slots(slots):
            raise MalformedFrame(f"an exchange for slots {slots[:8]} … of {self._spec.slots}")
        push_rows = {table: self._pushed(arrays, table, count) for table, count in numbers.push_rows}
        push_dense = self._dense(arrays, numbers.push_dense, len(slots))
        pull_rows = {table: arrays.take(np.uint64, count) for table, count in numbers.pull_rows}
        begin_dense = self._dense(arrays, numbers.begin_dense, len(slots))
        arrays.end()
        push = None
        if numbers.batch is not None:
            epoch, batch = numbers.batch
            self._check_batches(epoch, batch, 1)
            push = Update(epoch, batch, slots, push_rows, push_dense, numbers.origin)
        elif push_rows or push_dense:
            raise MalformedFrame("gradients without the number of their batch")
        asked = None
        if numbers.which_applied is not None:
            asked = BatchRange(*numbers.which_applied)
            self._check_batches(asked.epoch, asked.first, asked.count)
        exchange = Exchange(
            numbers.term,
            slots,
            push,
            pull_rows,
            numbers.pull_dense,
            begin_dense,
            which_applied=asked,
            committed=numbers.committed,
        )
        return numbers.number, exchange

    # Replies.

    def encode_reply(self, number: int, reply: ExchangeReply) -> Encoded:
        slots = len(next(iter(reply.dense.values()), ()))
        numbers = _ReplyNumbers(
            number,
            reply.status,
            slots,
            _counts(reply.rows),
            tuple(reply.dense),
            len(reply.applied),
            reply.duplicates,
            len(reply.versions),
            len(reply.served),
        )
        arrays: list[NDArray[Any]] = [
            *reply.rows.values(),
            *reply.dense.values(),
            reply.applied,
            reply.versions,
            reply.served,
        ]
        return msgspec.msgpack.encode(numbers), _padded(arrays)

    def decode_reply(self, frame: PsFrame) -> tuple[int, ExchangeReply]:
        numbers = self._reply.decode(frame.numbers)
        self._check_names(numbers.rows, numbers.dense)
        arrays = _Arrays(frame.arrays)
        rows = {table: self._rows(arrays, table, count) for table, count in numbers.rows}
        dense = self._dense(arrays, numbers.dense, numbers.slots)
        applied = arrays.take(np.uint8, numbers.applied).view(np.bool_)
        versions = arrays.take(np.int64, numbers.versions)
        served = arrays.take(np.int64, numbers.served)
        arrays.end()
        if len(served) and not self._are_slots(served):
            raise MalformedFrame(f"a reply for slots {served[:8]} … of {self._spec.slots}")
        reply = ExchangeReply(numbers.status, rows, dense, applied, numbers.duplicates, versions, served)
        return numbers.number, reply

    # Slots on their way to another server.

    def encode_copy(self, copy: SlotCopy) -> Encoded:
        numbers = _CopyNumbers(copy.role, copy.number, copy.term)
        return msgspec.msgpack.encode(numbers), list(copy.state.parts())

    def decode_copy(self, frame: PsFrame) -> SlotCopy:
        numbers = self._copy.decode(frame.numbers)
        try:
            state = parse_slot_state(frame.arrays)
        except MalformedState as error:
            raise MalformedFrame(str(error)) from error
        return SlotCopy(numbers.role, numbers.number, numbers.term, state)

    # Parts.

    def _pushed(self, arrays: _Arrays, table: int, count: int) -> tuple[Keys, Rows]:
        return arrays.take(np.uint64, count), self._rows(arrays, table, count)

    def _rows(self, arrays: _Arrays, table: int, count: int) -> Rows:
        return arrays.take(np.float32, count, self._widths[table])

    def _dense(self, arrays: _Arrays, tensors: Iterable[int], slots: int) -> Mapping[int, Rows]:
        return {tensor: arrays.take(np.float32, slots, self._pieces[tensor]) for tensor in tensors}

    def _check_names(self, rows: _Counts, dense: Sequence[int]) -> None:
        tables = [table for table, _ in rows]
        for named, known in ((tables, self._widths), (dense, self._pieces)):
            if len(set(named)) < len(named) or not all(0 <= each < len(known) for each in named):
                raise MalformedFrame(f"tables or tensors {list(named)} of {len(known)}")

    def _check_batches(self, epoch: int, first: int, count: int) -> None:
        if not 0 <= epoch < 1 << 31 or first < 0 or not 0 <= count <= self._batches - first:
            raise MalformedFrame(
                f"batches {first} … {first + count} of epoch {epoch}; it has {self._batches}"
            )

    def _are_slots(self, slots: NDArray[np.int64]) -> bool:
        inside = len(slots) > 0 and slots[0] >= 0 and slots[-1] < self._spec.slots
        return bool(inside and np.all(slots[1:] > slots[:-1]))


class _Arrays:
    """Takes arrays from the bytes of a frame, in order."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._offset = data, 0

    def take(self, dtype: DTypeLike, rows: int, columns: int | None = None) -> NDArray[Any]:
        count = rows if columns is None else rows * columns
        size = count * np.dtype(dtype).itemsize
        if rows < 0 or size > len(self._data) - self._offset:
            raise MalformedFrame(f"{len(self._data)} bytes of arrays, of which one should have {size} more")
        array = np.frombuffer(self._data, dtype, count, self._offset)
        self._offset += size + -size % _ALIGN
        return array if columns is None else array.reshape(rows, columns)

    def end(self) -> None:
        if self._offset != len(self._data):
            raise MalformedFrame(f"{len(self._data)} bytes of arrays, of which {self._offset} are described")


def _counts(rows: Mapping[int, NDArray[Any]]) -> _Counts:
    return tuple((table, len(each)) for table, each in rows.items())


def _padded(arrays: Iterable[NDArray[Any]]) -> list[memoryview]:
    """Every array begins at a multiple of 8 bytes."""
    parts: list[memoryview] = []
    for array in arrays:
        if array.nbytes:
            parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            if array.nbytes % _ALIGN:
                parts.append(memoryview(bytes(-array.nbytes % _ALIGN)))
    return parts

"""The state of one slot: named arrays and a few numbers. Equal content gives equal bytes, whatever its history.

As bytes it is a safetensors file, header first: a checkpoint has one such file per slot, and a slot that moves travels
as one. The arrays are written from where they are and read as views: neither direction copies the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyrostat.core.errors import MalformedState

_DTYPES = {"F32": np.float32, "I64": np.int64, "U64": np.uint64, "U8": np.uint8}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_LENGTH = 8
_MOST_HEADER = 16 << 20
_ALIGN = 8


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class SlotState:
    """One slot at one instant."""

    slot: int
    slots: int
    """V."""
    version: int
    """Updates applied; of ordered jobs, steps."""
    forgotten: int
    arrays: Mapping[str, NDArray[Any]]

    @property
    def digest(self) -> str:
        """SHA-256 of its bytes."""
        hasher = sha256()
        for part in self.parts():
            hasher.update(part)
        return hasher.hexdigest()

    @property
    def content_digest(self) -> str:
        """SHA-256 of rows, dense values and optimizer state alone: versions and bitmaps depend on checkpoints."""
        hasher = sha256()
        for name in sorted(self.arrays):
            if name.startswith(("table.", "dense.")):
                array = np.ascontiguousarray(self.arrays[name])
                hasher.update(f"{name} {array.dtype} {array.shape} ".encode())
                hasher.update(array.reshape(-1).view(np.uint8).data)
        return hasher.hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts())

    def parts(self) -> Iterator[memoryview]:
        """The bytes of the file, in pieces that need no copy."""
        names = sorted(self.arrays)
        header: dict[str, Any] = {
            "__metadata__": {
                "slot": str(self.slot),
                "slots": str(self.slots),
                "version": str(self.version),
                "forgotten": str(self.forgotten),
            }
        }
        offset = 0
        for name in names:
            array = self.arrays[name]
            header[name] = _Entry(_NAMES[array.dtype], array.shape, (offset, offset + array.nbytes))
            offset += array.nbytes
        encoded = msgspec.json.encode(header)
        encoded += b" " * (-(_LENGTH + len(encoded)) % _ALIGN)
        yield memoryview(len(encoded).to_bytes(_LENGTH, "little") + encoded)
        for name in names:
            array = self.arrays[name]
            if array.nbytes:
                yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def job_digest(content_digests: Iterable[str]) -> str:
    """The digest of a job's parameters, from those of its slots in their order."""
    return sha256(" ".join(content_digests).encode()).hexdigest()


def parse_slot_state(data: memoryview | bytes) -> SlotState:
    """The inverse of `parts`; arrays are views of `data`. Every offset is checked before it is used."""
    view = memoryview(data)
    length = int.from_bytes(view[:_LENGTH], "little")
    if len(view) < _LENGTH or length > min(_MOST_HEADER, len(view) - _LENGTH):
        raise MalformedState(f"{len(view)} bytes are not the state of a slot: its header would have {length}")
    try:
        header = msgspec.json.decode(view[_LENGTH : _LENGTH + length], type=dict[str, msgspec.Raw])
        numbers = msgspec.json.decode(header.pop("__metadata__"), type=dict[str, str])
        slot, slots = int(numbers["slot"]), int(numbers["slots"])
        version, forgotten = int(numbers["version"]), int(numbers["forgotten"])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, ValueError) as error:
        raise MalformedState(f"the header of a slot's state cannot be read: {error}") from error
    if not 0 <= slot < slots:
        raise MalformedState(f"the state of slot {slot} of {slots}")
    body = view[_LENGTH + length :]
    return SlotState(
        slot, slots, version, forgotten, {name: _array(body, name, each) for name, each in entries.items()}
    )


def _array(body: memoryview, name: str, entry: _Entry) -> NDArray[Any]:
    start, stop = entry.data_offsets
    dtype = _DTYPES.get(entry.dtype)
    count = 1
    for size in entry.shape:
        count *= size
    if dtype is None or min(entry.shape, default=0) < 0 or not 0 <= start <= stop <= len(body):
        raise MalformedState(f"array {name!r} of a slot's state: {entry}, in {len(body)} bytes")
    if count * np.dtype(dtype).itemsize != stop - start:
        raise MalformedState(
            f"array {name!r} of a slot's state has shape {entry.shape} in {stop - start} bytes"
        )
    return np.frombuffer(body[start:stop], dtype).reshape(entry.shape)

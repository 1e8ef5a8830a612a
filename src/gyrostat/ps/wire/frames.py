"""Frames: a header of fixed size, a few numbers as MessagePack, and raw bytes.

    magic 4 | kind 2 | 0 2 | bytes of numbers 4 | 0 4 | bytes of arrays 8 | numbers, padded to 8 | arrays

The reader checks both sizes before it takes memory, and receives into one buffer, of which the arrays become views.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

import numpy as np

from gyrostat.core.errors import GyrostatError

_HEADER = Struct("<4sHHIIQ")
_MAGIC = b"gps1"
_ALIGN = 8
MOST_NUMBERS = 8 << 20
"""The map of the largest job has 4096 slots and as many file names."""


class MalformedFrame(GyrostatError):
    """Bytes that are not a frame of this protocol. The connection is closed; nothing else happens."""


class FrameKind(IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    CONTROL = 4
    """A message of `control`, with at most one array of bytes."""
    EXCHANGE = 5
    """A worker's push and pull."""
    REPLY = 6
    COPY = 7
    """A slot on its way to another server."""
    FORWARD = 8
    """An update for a mirror."""
    FORWARDED = 9
    """The answer of the mirror."""


_KINDS = frozenset(map(int, FrameKind))


@dataclass(frozen=True)
class PsFrame:
    kind: FrameKind
    numbers: memoryview
    arrays: memoryview
    """Begins at a multiple of 8 bytes; writable."""


def frame_parts(kind: FrameKind, numbers: bytes, arrays: Sequence[memoryview] = ()) -> list[memoryview]:
    """The bytes of a frame, without a copy of its arrays."""
    size = sum(each.nbytes for each in arrays)
    header = _HEADER.pack(_MAGIC, kind, 0, len(numbers), 0, size)
    padding = b"\0" * (-len(numbers) % _ALIGN)
    return [memoryview(header + numbers + padding), *arrays]


class FrameReader:
    """Receives one frame after the other from a socket that does not block."""

    def __init__(self, most_arrays: int, most_numbers: int = MOST_NUMBERS) -> None:
        self.most_arrays, self.most_numbers = most_arrays, most_numbers
        self._header = memoryview(bytearray(_HEADER.size))
        self._buffer = self._header
        self._received = 0
        self._kind: FrameKind | None = None
        self._numbers = 0

    def receive(self, sock: socket.socket) -> PsFrame | None:
        """The next frame, if it is complete; None: more has to arrive. Raises `MalformedFrame`, and `EOFError` at the end."""
        while True:
            if self._received == len(self._buffer):
                if self._kind is not None:
                    return self._complete()
                self._begin()
                continue
            try:
                count = sock.recv_into(self._buffer[self._received :])
            except (BlockingIOError, InterruptedError):
                return None
            if count == 0:
                raise EOFError
            self._received += count

    def _begin(self) -> None:
        magic, kind, zero, numbers, more_zeros, arrays = _HEADER.unpack(self._header)
        if magic != _MAGIC or zero or more_zeros or kind not in _KINDS:
            raise MalformedFrame(f"a frame begins with {bytes(self._header)!r}")
        if numbers > self.most_numbers or arrays > self.most_arrays:
            raise MalformedFrame(
                f"a frame of {numbers} + {arrays} bytes; at most {self.most_numbers} + {self.most_arrays} are accepted here"
            )
        self._kind, self._numbers = FrameKind(kind), numbers
        # Pages of a large buffer are taken when bytes arrive.
        self._buffer = np.empty(numbers + -numbers % _ALIGN + arrays, np.uint8).data
        self._received = 0

    def _complete(self) -> PsFrame:
        assert self._kind is not None
        start = self._numbers + -self._numbers % _ALIGN
        frame = PsFrame(self._kind, self._buffer[: self._numbers], self._buffer[start:])
        self._kind, self._buffer, self._received = None, self._header, 0
        return frame

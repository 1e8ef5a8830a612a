"""Event files for TensorBoard: what a script passes to `job.log`, one record per call.

An event file is a sequence of records: length, checksum of the length, message, checksum of the message. Messages are
`tensorflow.Event` in protocol buffers, of which scalars need five fields; encoding those here saves every job the import of
TensorBoard. Each attempt of a job opens a file of its own and states the step from which it continues, so that TensorBoard
drops what an earlier attempt logged beyond its last checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

_DOUBLE, _BYTES, _FLOAT = 1, 2, 5
"""Wire types of protocol buffers; 0 is a variable-length integer."""
_SESSION_START = 1


class EventFile:
    """Scalars by step, in a new file of `directory`, created with the first record. A record is written at once, completely
    or not at all; on a full disk records are lost, and the job goes on."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory, self._clock = directory, clock
        self._file: IO[bytes] | None = None
        self._begun_at = 0

    def began(self, step: int) -> None:
        """Training begins, or continues, after `step` steps: later ones will be logged again."""
        self._begun_at = step
        if self._file is not None:
            self._write(event(self._clock(), step + 1, session_start=True))

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """The arguments of `job.log(**metrics)` after `step` steps."""
        if self._file is None:
            self._open()
        self._write(event(self._clock(), step, scalars=metrics))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        now = self._clock()
        name = (
            f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        )
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = (self._directory / name).open("xb", buffering=0)
        self._write(event(now, 0, file_version="brain.Event:2"))
        self.began(self._begun_at)

    def _write(self, message: bytes) -> None:
        if self._file is None:
            return
        whole, before = record(message), self._file.tell()
        with contextlib.suppress(OSError):
            if self._file.write(whole) == len(whole):
                return
        with contextlib.suppress(OSError):
            self._file.truncate(before)
            self._file.seek(before)


def record(message: bytes) -> bytes:
    """A message as a record of the file."""
    length = struct.pack("<Q", len(message))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), message, struct.pack("<I", masked_crc(message)))
    )


def event(
    wall_time: float,
    step: int,
    *,
    file_version: str | None = None,
    session_start: bool = False,
    scalars: Mapping[str, float] | None = None,
) -> bytes:
    """A `tensorflow.Event`."""
    parts = [_field(1, _DOUBLE, struct.pack("<d", wall_time)), _field(2, 0, _varint(step))]
    if file_version is not None:
        parts.append(_field(3, _BYTES, file_version.encode()))
    if scalars is not None:
        values = (
            _field(1, _BYTES, tag.encode()) + _field(2, _FLOAT, _single(value))
            for tag, value in scalars.items()
        )
        parts.append(_field(5, _BYTES, b"".join(_field(1, _BYTES, value) for value in values)))
    if session_start:
        parts.append(_field(7, _BYTES, _field(1, 0, _varint(_SESSION_START))))
    return b"".join(parts)


def _single(value: float) -> bytes:
    """In single precision; values out of range become infinite."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _field(number: int, wire_type: int, content: bytes) -> bytes:
    key = _varint(number << 3 | wire_type)
    return key + (_varint(len(content)) if wire_type == _BYTES else b"") + content


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= 0xFFFF_FFFF_FFFF_FFFF
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def masked_crc(data: bytes) -> int:
    """CRC-32C as records carry it: turned and shifted, since data may contain checksums itself."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF


def crc32c(data: bytes) -> int:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFF_FFFF


def _table() -> tuple[int, ...]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _table()

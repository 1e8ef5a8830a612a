"""A worker's flight recorder: a small file in which it notes the micro-batch it is about to run.

The file is mapped into the worker's memory, so a note costs a copy of a few bytes and no system call, and it is there however
the worker ends: what a process has written to a mapped file the kernel keeps, even if it is killed in the next instant. Its
agent's crew reads the file when the worker has gone.

A note is taken back before it is changed, so one that was cut off by death counts as none.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

from gyrostat.core.evidence import RunningMicroBatch

_HEADER = struct.Struct(
    "<qqqqq"
)  # step, rank, number, how many samples (-1: unknown), how many of them are noted
_VALID = 8  # bytes before the header; the first says whether a note is valid
_MOST = 4096
_SIZE = _VALID + _HEADER.size + 8 * _MOST


class BlackBox:
    """The worker's side."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if there is no room for it: better now than by SIGBUS in the first note."""
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def note(self, step: int, rank: int, number: int, samples: Sequence[int] | None) -> None:
        """This micro-batch begins."""
        box = self._map
        box[0] = 0
        if samples is None:
            _HEADER.pack_into(box, _VALID, step, rank, number, -1, 0)
        else:
            noted = array("q", samples[:_MOST])
            _HEADER.pack_into(box, _VALID, step, rank, number, len(samples), len(noted))
            start = _VALID + _HEADER.size
            box[start : start + 8 * len(noted)] = noted.tobytes()
        box[0] = 1

    def clear(self) -> None:
        """It has ended."""
        self._map[0] = 0


def read(path: Path) -> RunningMicroBatch | None:
    """What a worker that has gone was running; None if it was not, or left no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _SIZE or data[0] != 1:
        return None
    step, rank, number, size, count = _HEADER.unpack_from(data, _VALID)
    samples: tuple[int, ...] | None = None
    if 0 <= count <= size and count <= _MOST:
        start = _VALID + _HEADER.size
        samples = tuple(array("q", data[start : start + 8 * count]))
    return RunningMicroBatch(step=step, rank=rank, number=number, samples=samples, size=max(size, 0))

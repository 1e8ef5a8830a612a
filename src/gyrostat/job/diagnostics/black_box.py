"""A worker's flight recorder: a small file in which it notes the micro-batch that it is about to run.

The file is mapped into the worker's memory, so a note is a copy of a few bytes without a system call. The kernel keeps what a
process has written to a mapped file even if the process is killed at once. The agent's worker pool (`processes.worker_pool`)
reads the file when the worker has exited.

A note is marked invalid while it is changed, so a partial one is ignored.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

from gyrostat.core.evidence import RunningMicroBatch

_HEADER = struct.Struct("<qqqqq")
"""Step, rank, number, number of samples (-1: unknown), number of samples noted."""
_VALID = 8
"""Bytes before the header; the first is 1 if the note is valid."""
_MAX_SAMPLES = 4096
_SIZE = _VALID + _HEADER.size + 8 * _MAX_SAMPLES


class BlackBox:
    """The worker's side. Called in the script's thread only."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the disk is full; without the allocation the first note would raise SIGBUS."""
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def note(self, step: int, rank: int, number: int, samples: Sequence[int] | None) -> None:
        """The micro-batch begins."""
        box = self._map
        box[0] = 0
        if samples is None:
            _HEADER.pack_into(box, _VALID, step, rank, number, -1, 0)
        else:
            noted = array("q", samples[:_MAX_SAMPLES])
            _HEADER.pack_into(box, _VALID, step, rank, number, len(samples), len(noted))
            start = _VALID + _HEADER.size
            box[start : start + 8 * len(noted)] = noted.tobytes()
        box[0] = 1

    def clear(self) -> None:
        """The micro-batch has ended."""
        self._map[0] = 0


def read(path: Path) -> RunningMicroBatch | None:
    """The micro-batch that an exited worker was running; None if it ran none, or the file does not exist."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _SIZE or data[0] != 1:
        return None
    step, rank, number, size, count = _HEADER.unpack_from(data, _VALID)
    samples: tuple[int, ...] | None = None
    if 0 <= count <= size and count <= _MAX_SAMPLES:
        start = _VALID + _HEADER.size
        samples = tuple(array("q", data[start : start + 8 * count]))
    return RunningMicroBatch(step=step, rank=rank, number=number, samples=samples, size=max(size, 0))

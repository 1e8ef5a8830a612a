"""Log files with a limited size: `output.log`, then `output.log.1`, `.2` …"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import IO

LARGEST = 16 << 20
KEPT = 3


class RotatingFile:
    """Written line by line. A file that is too large becomes `.1`, the former `.1` becomes `.2`, and so on. On a full disk
    lines are lost, and the job goes on."""

    def __init__(self, path: Path, *, largest: int = LARGEST, kept: int = KEPT) -> None:
        self._path, self._largest, self._kept = path, largest, kept
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def write(self, line: str) -> None:
        data = line.encode("utf-8", errors="replace") + b"\n"
        with contextlib.suppress(OSError):
            if self._size and self._size + len(data) > self._largest:
                with contextlib.suppress(OSError):
                    self._rotate()
            self._size += self._file.write(data)

    def _rotate(self) -> None:
        beside = self._path.with_name(f"{self._path.name}.new")
        fresh = beside.open("wb", buffering=0)  # first: if this fails, nothing has changed
        _shift(self._path, self._kept)
        if self._kept:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        beside.replace(self._path)
        self._file.close()
        self._file, self._size = fresh, 0

    def close(self) -> None:
        self._file.close()


def cut(path: Path, *, largest: int = LARGEST, kept: int = KEPT) -> None:
    """The same for a file to which other processes append: it is copied, then emptied."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > largest:
            _shift(path, kept)
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def _shift(path: Path, kept: int) -> None:
    for number in range(kept - 1, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        if older.exists():
            older.replace(path.with_name(f"{path.name}.{number + 1}"))

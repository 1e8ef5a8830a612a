"""The output of workers: splits it into lines, and keeps it in one log file per worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO

_MAX_LINE = 1 << 16


class OutputStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


class LineSplitter:
    """Splits a stream into lines.

    Of text that a progress bar overwrites with carriage returns only the last is kept. A longer line is split after 64 KiB.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield _text(line)
        if b"\r" in self._rest[:-1]:
            self._rest = self._rest[self._rest.rindex(b"\r", 0, -1) + 1 :]
        while len(self._rest) > _MAX_LINE:
            yield _text(self._rest[:_MAX_LINE])
            self._rest = self._rest[_MAX_LINE:]

    def end(self) -> Iterator[str]:
        """The last line, if it has no newline."""
        rest, self._rest = self._rest, b""
        if rest:
            yield _text(rest)


def _text(line: bytes) -> str:
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :].decode("utf-8", errors="replace")


class Tail:
    """Reads lines that another process appends to a file."""

    def __init__(self, path: Path) -> None:
        """Starts at the current end of the file."""
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._lines = LineSplitter()

    def read(self) -> Iterator[str]:
        while data := self._file.read(_MAX_LINE):
            yield from self._lines.feed(data)

    def close(self) -> Iterator[str]:
        """The remaining lines."""
        yield from self.read()
        yield from self._lines.end()
        self._file.close()


class LogFiles:
    """`worker-0.log`, `worker-1.log` …: the output of each worker in order of arrival; `worker-0.exit` …: their exit codes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._files: dict[int, IO[str]] = {}

    def open(self, worker: int, *, append: bool = False) -> int:
        """Open the log and return its descriptor. `append`: a restarted job adds to the output of its previous attempts."""
        path = self.path(worker)
        if worker in self._files:
            self._files[worker].close()
        if not append:
            path.write_bytes(b"")
        self._files[worker] = path.open("a", encoding="utf-8", buffering=1)
        return self._files[worker].fileno()

    def path(self, worker: int) -> Path:
        return self._directory / f"worker-{worker}.log"

    def exited(self, worker: int, code: int) -> None:
        """Write `worker-0.exit`: the exit code, or the negated signal that killed the worker."""
        (self._directory / f"worker-{worker}.exit").write_text(f"{code}\n")

    def write(self, worker: int, line: str) -> None:
        self._files[worker].write(line + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

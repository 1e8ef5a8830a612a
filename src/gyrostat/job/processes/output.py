"""What workers print: bytes from pipes become lines, and lines may be kept in one file per worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO

_LONGEST = 1 << 16


class OutputStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


class LineSplitter:
    """Cuts a stream into lines.

    Of what a progress bar writes over itself with carriage returns only the last is kept. A line without an
    end is cut after 64 KiB.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield _text(line)
        if b"\r" in self._rest[:-1]:
            self._rest = self._rest[self._rest.rindex(b"\r", 0, -1) + 1 :]
        while len(self._rest) > _LONGEST:
            yield _text(self._rest[:_LONGEST])
            self._rest = self._rest[_LONGEST:]

    def end(self) -> Iterator[str]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        if rest:
            yield _text(rest)


def _text(line: bytes) -> str:
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :].decode("utf-8", errors="replace")


class Tail:
    """What is added to a file that somebody else writes."""

    def __init__(self, path: Path) -> None:
        """From its present end on."""
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._lines = LineSplitter()

    def read(self) -> Iterator[str]:
        while data := self._file.read(_LONGEST):
            yield from self._lines.feed(data)

    def close(self) -> Iterator[str]:
        """The rest."""
        yield from self.read()
        yield from self._lines.end()
        self._file.close()


class LogFiles:
    """`worker-0.log`, `worker-1.log` …: everything each worker printed, in order of arrival; and how each exited."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._files: dict[int, IO[str]] = {}

    def open(self, worker: int, *, append: bool = False) -> int:
        """The file's descriptor. `append`: a job that is started again adds to what its workers said before."""
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
        """`worker-0.exit`: its exit code, or the negated signal that killed it."""
        (self._directory / f"worker-{worker}.exit").write_text(f"{code}\n")

    def write(self, worker: int, line: str) -> None:
        self._files[worker].write(line + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

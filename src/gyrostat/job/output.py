"""What workers print: bytes from pipes become lines, and lines may be kept in one file per worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

_LONGEST = 1 << 16


class Lines:
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


class LogFiles:
    """`worker-0.log`, `worker-1.log` …: everything each worker printed, in order of arrival."""

    def __init__(self, directory: Path, *, append: bool = False) -> None:
        """`append`: a job that is started again adds to what its workers said before."""
        self._mode = "a" if append else "w"
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._files: dict[int, IO[str]] = {}

    def open(self, worker: int) -> None:
        path = self._directory / f"worker-{worker}.log"
        self._files[worker] = path.open(self._mode, encoding="utf-8", buffering=1)

    def write(self, worker: int, line: str) -> None:
        self._files[worker].write(line + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

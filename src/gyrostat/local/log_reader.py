"""Reading a job's log while it is written and rotated, part by part.

A place in a log is a file's identity and an offset in it (`inode:offset:checksum`), so that a reader who was away while the
log was rotated goes on where it was, in `output.log.1` or whatever the file is called by then. Inodes are used again, hence the
checksum, of how the file begins. Parts end with whole lines; what a job printed last without a newline comes once it is over.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from gyrostat.cluster.records import LogChunk
from gyrostat.core.errors import UsageError

MOST_BYTES = 256 << 10
"""In one part."""
_PLACE = re.compile(r"([0-9]{1,20}):([0-9]{1,20}):([0-9]{1,10})")
_BEGINNING = 64


@dataclass(frozen=True)
class _File:
    path: Path
    inode: int
    size: int


def read_part(log: Path, after: str | None, tail: int | None, *, over: bool) -> LogChunk:
    """The lines after that place; without one, from the beginning or the last `tail` lines. `over`: nobody writes it any
    more.
    """
    files = _files(log)
    at, offset = _position(files, after)
    if after is None and tail is not None:
        at, offset = _back(files, tail)
    lines: list[str] = []
    budget = MOST_BYTES
    while at < len(files):
        last = at == len(files) - 1
        content = _read(files[at], offset, budget)
        ended = offset + len(content) >= files[at].size
        if not (ended and (over or not last)):
            whole = content.rfind(b"\n") + 1
            content = content[:whole] if whole or len(content) < MOST_BYTES else content
        lines += content.decode(errors="replace").removesuffix("\n").split("\n") if content else ()
        budget -= len(content)
        offset += len(content)
        if not ended or last or budget <= 0:
            break
        at, offset = at + 1, 0
    if not files:
        return LogChunk((), "", complete=True)
    return LogChunk(
        tuple(lines),
        f"{files[at].inode}:{offset}:{_checksum(files[at], offset)}",
        complete=at == len(files) - 1 and offset >= files[at].size,
    )


def _files(log: Path) -> list[_File]:
    """The oldest first."""
    numbers = (
        (int(number), path)
        for path in log.parent.glob(f"{log.name}.*")
        if (number := path.name.removeprefix(f"{log.name}.")).isdecimal()
    )
    found = []
    for path in [*(path for _, path in sorted(numbers, reverse=True)), log]:
        try:
            status = path.stat()
        except OSError:
            continue  # rotated this very moment, or not there yet
        found.append(_File(path, status.st_ino, status.st_size))
    return found


def _position(files: list[_File], after: str | None) -> tuple[int, int]:
    """Which file, and where in it; the oldest one if the place is in none of them any more."""
    if not after:
        return 0, 0
    match = _PLACE.fullmatch(after)
    if match is None:
        raise UsageError(f"a place in a log is what `next` of an earlier answer was; got {after!r}")
    inode, offset, checksum = map(int, match.groups())
    for number, file in enumerate(files):
        if file.inode == inode and offset <= file.size and checksum == _checksum(file, offset):
            return number, offset
    return 0, 0


def _checksum(file: _File, offset: int) -> int:
    return zlib.crc32(_read(file, 0, min(offset, _BEGINNING)))


def _back(files: list[_File], lines: int) -> tuple[int, int]:
    """Where the last `lines` lines begin."""
    if lines == 0 and files:
        return len(files) - 1, files[-1].size
    missing = lines
    for number in reversed(range(len(files))):
        end = files[number].size
        newline_at_end = True
        while end > 0:
            start = max(0, end - MOST_BYTES)
            content = _read(files[number], start, end - start)
            if newline_at_end:
                content = content.removesuffix(b"\n")
                newline_at_end = False
            place = len(content)
            while missing and (place := content.rfind(b"\n", 0, place)) >= 0:
                missing -= 1
            if not missing:
                return number, start + place + 1
            end = start
        if files[number].size:
            missing -= 1  # the first line of a file has no newline before it
        if missing == 0:
            return number, 0
    return 0, 0


def _read(file: _File, offset: int, most: int) -> bytes:
    """Of the file as it was found: if another has its name by now, nothing."""
    try:
        with file.path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_ino != file.inode:
                return b""
            stream.seek(offset)
            return stream.read(min(most, file.size - offset))
    except OSError:
        return b""

"""Reads a job's log part by part, while it is written and rotated.

A position in a log is a file's identity and an offset in it (`inode:offset:checksum`), so that a reader continues where it
was after the log was rotated, in `output.log.1` or whatever name the file has then. Inodes are reused, hence the checksum of
the beginning of the file. Parts end with complete lines; a last line without a newline is returned once the job has ended.
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
_POSITION = re.compile(r"([0-9]{1,20}):([0-9]{1,20}):([0-9]{1,10})")
_BEGINNING = 64


@dataclass(frozen=True)
class _File:
    path: Path
    inode: int
    size: int


def read_part(log: Path, after: str | None, tail: int | None, *, over: bool) -> LogChunk:
    """The lines after a position; without one, from the beginning or the last `tail` lines. `over`: the log is complete."""
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
            continue  # being rotated, or not created yet
        found.append(_File(path, status.st_ino, status.st_size))
    return found


def _position(files: list[_File], after: str | None) -> tuple[int, int]:
    """Index of the file and offset in it; the start of the oldest one if the position is in none of them any more."""
    if not after:
        return 0, 0
    match = _POSITION.fullmatch(after)
    if match is None:
        raise UsageError(f"a position in a log is `next` of an earlier response; got {after!r}")
    inode, offset, checksum = map(int, match.groups())
    for number, file in enumerate(files):
        if file.inode == inode and offset <= file.size and checksum == _checksum(file, offset):
            return number, offset
    return 0, 0


def _checksum(file: _File, offset: int) -> int:
    return zlib.crc32(_read(file, 0, min(offset, _BEGINNING)))


def _back(files: list[_File], lines: int) -> tuple[int, int]:
    """The position of the last `lines` lines."""
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
    """Of the file that was found: nothing if another has its name by now."""
    try:
        with file.path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_ino != file.inode:
                return b""
            stream.seek(offset)
            return stream.read(min(most, file.size - offset))
    except OSError:
        return b""

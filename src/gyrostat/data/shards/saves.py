"""A directory that keeps shard queues and a program's parameters together: both of one step, or neither.

    DIRECTORY/step-00000120/    what the program wrote, in its own format
                 shards.json    the queues at that step; size and SHA-256 of every file, its own included

A save is written under another name, synced, and renamed into place: a crash at any instant leaves earlier ones intact. A lock,
which ends with its process, keeps a second process from using the same directory.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import msgspec

from gyrostat.core.errors import DamagedCheckpoint, UsageError

INDEX = "shards.json"
_WRITING = ".writing"
_NAME = re.compile(r"step-(?P<step>\d+)(\.(?P<number>\d+))?")


class _File(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class _Index(msgspec.Struct, frozen=True):
    step: int
    queues: dict[str, Any]
    files: dict[str, _File]
    digest: str = ""
    """SHA-256 of the same with an empty digest."""

    def signed(self) -> _Index:
        unsigned = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=sha256(unsigned).hexdigest())


@dataclass(frozen=True)
class Save:
    """A complete save."""

    path: Path
    step: int
    queues: dict[str, Any]


class Saves:
    """The saves in one directory, and the right to write there until `close` or the process's end."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        if keep < 1:
            raise UsageError(f"keep must be at least 1, got {keep}")
        self.directory, self._keep = directory, keep
        directory.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(
                f"another process uses the shards of {directory}; wait for its end, or use another directory"
            ) from None

    def newest(self) -> tuple[Save | None, list[str]]:
        """The newest complete save, and why newer ones cannot be used. Raises if saves exist and none is complete."""
        refused: list[str] = []
        for path in reversed(self._oldest_first()):
            try:
                return _read(path), refused
            except DamagedCheckpoint as error:
                refused.append(str(error))
        if refused:
            raise DamagedCheckpoint(
                "no save can be used: " + "; ".join(refused) + f". Remove {self.directory} to start anew"
            )
        return None, []

    def write(self, step: int, queues: dict[str, Any], program: Callable[[Path], object]) -> Path:
        """Write a save: `program` writes its own state into the directory it is given; the queues are written beside it."""
        writing = self.directory / _WRITING
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        program(writing)
        if (writing / INDEX).exists():
            raise UsageError(
                f"the program wrote a file {INDEX}, which is the name of the shard queues; use another"
            )
        files = {
            str(path.relative_to(writing)): path for path in sorted(writing.rglob("*")) if path.is_file()
        }
        index = _Index(step, queues, {name: _described(path) for name, path in files.items()})
        (writing / INDEX).write_bytes(msgspec.json.encode(index.signed()))
        for path in [*writing.rglob("*"), writing]:
            _sync(path)
        path = self._free_name(step)
        writing.rename(path)
        _sync(self.directory)
        saves = self._oldest_first()
        for old in saves[: saves.index(path) + 1][: -self._keep]:
            shutil.rmtree(old)
        return path

    def _oldest_first(self) -> list[Path]:
        return [path for _, path in self._by_age()]

    def _by_age(self) -> list[tuple[tuple[int, int], Path]]:
        """All saves with the numbers in their names, sorted by them: as text, 10 would precede 9."""
        named = ((path, _NAME.fullmatch(path.name)) for path in self.directory.iterdir())
        return sorted(((int(name["step"]), int(name["number"] or 0)), path) for path, name in named if name)

    def _free_name(self, step: int) -> Path:
        """A step may be saved twice: if a newer save was damaged, or nothing was trained since. Neither is overwritten."""
        same_step = [number for (saved, number), _ in self._by_age() if saved == step]
        suffix = f".{max(same_step) + 1}" if same_step else ""
        return self.directory / f"step-{step:08d}{suffix}"

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _read(path: Path) -> Save:
    try:
        index = msgspec.json.decode((path / INDEX).read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError) as error:
        raise DamagedCheckpoint(f"{path / INDEX} cannot be read: {error}") from error
    if index != index.signed():
        raise DamagedCheckpoint(f"{path / INDEX} is damaged: its digest is wrong")
    for name, wanted in index.files.items():
        try:
            found = _described(path / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{path / name} cannot be read: {error}") from error
        if found != wanted:
            raise DamagedCheckpoint(
                f"{path / name} is damaged: {found.size} bytes, {wanted.size} when it was written"
            )
    return Save(path, index.step, index.queues)


def _described(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(os.fstat(file.fileno()).st_size, file_digest(file, "sha256").hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

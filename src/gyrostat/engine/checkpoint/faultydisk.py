"""A disk that fails on purpose, for tests of checkpoints.

`cut_at=k`: the k-th call and all later ones raise `PowerCut`. `torn`: half of that write was made. `forgetful`: whatever was
not synced is lost. `full_at=k`: from the k-th call on the disk has no room; removing still works.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from gyrostat.engine.checkpoint.disk import Disk


class PowerCut(BaseException):
    """The machine is off. A BaseException, since no program can handle it."""


class FaultyDisk(Disk):
    """Counts its calls from 1 and fails as its arguments say."""

    def __init__(
        self,
        *,
        cut_at: int | None = None,
        full_at: int | None = None,
        torn: bool = False,
        forgetful: bool = False,
    ) -> None:
        self.calls: list[str] = []
        """The names of the calls so far."""
        self._cut_at, self._full_at = cut_at, full_at
        self._torn, self._forgetful = torn, forgetful
        self._unsynced: dict[int, int] = {}  # by inode: a descriptor of our own, since files are renamed
        self._renames: list[tuple[Path, Path]] = []
        self._off = False

    def make_directory(self, path: Path) -> None:
        self._called("make_directory")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._called("create")
        descriptor = super().create(path)
        self._unsynced[os.fstat(descriptor).st_ino] = os.dup(descriptor)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        try:
            self._called("write")
        except (PowerCut, OSError):
            if self._torn and len(self.calls) in (self._cut_at, self._full_at):
                os.write(descriptor, data[: len(data) // 2])
                self._forget()
            raise
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._called("sync")
        super().sync(descriptor)
        mine = self._unsynced.pop(os.fstat(descriptor).st_ino, None)
        if mine is None:
            self._renames.clear()  # a directory: its names are safe now
        else:
            os.close(mine)

    def rename(self, old: Path, new: Path) -> None:
        self._called("rename")
        super().rename(old, new)
        self._renames.append((old, new))

    def remove_file(self, path: Path) -> None:
        self._called("remove_file", frees=True)
        super().remove_file(path)

    def remove_directory(self, path: Path) -> None:
        self._called("remove_directory", frees=True)
        super().remove_directory(path)

    def _called(self, name: str, *, frees: bool = False) -> None:
        if self._off:
            raise PowerCut
        self.calls.append(name)
        if self._cut_at == len(self.calls):
            self._off = True
            self._forget()
            raise PowerCut
        if self._full_at is not None and len(self.calls) >= self._full_at and not frees:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _forget(self) -> None:
        """Lose what a power cut may lose: contents and names that were not synced."""
        if not self._off or not self._forgetful:
            return
        for descriptor in self._unsynced.values():
            os.truncate(descriptor, 0)
        while self._renames:
            old, new = self._renames.pop()
            if new.exists():
                os.rename(new, old)

    def __del__(self) -> None:
        for descriptor in self._unsynced.values():
            os.close(descriptor)

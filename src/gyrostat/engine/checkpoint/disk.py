"""Every call by which checkpoints change the file system.

`faultydisk.py` replaces it in tests to simulate a power cut, or a full disk, at the k-th call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from gyrostat.engine.checkpoint.manifest import FileRecord

_SLICE = 64 * 1024 * 1024
"""The largest piece that is written, or hashed, at once."""


class Disk:
    """The file system of this machine."""

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Open a new file for writing; it is an error if it exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write a part of `data`; returns how many bytes."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Return when everything written would survive a power cut."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)


def write_file(disk: Disk, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write and sync a new file. Returns the size and checksum of `chunks`."""
    size, checksum = 0, sha256()
    descriptor = disk.create(path)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            while len(view):
                piece = view[:_SLICE]
                written = disk.write(descriptor, piece)
                checksum.update(piece[:written])
                view, size = view[written:], size + written
        disk.sync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(size=size, sha256=checksum.hexdigest())


def sync_directory(disk: Disk, path: Path) -> None:
    """Sync the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(disk: Disk, path: Path) -> None:
    """Make the directory and its parents, each synced in its own parent."""
    if not path.is_dir():
        make_directories(disk, path.parent)
        disk.make_directory(path)
        sync_directory(disk, path.parent)


def remove(disk: Disk, path: Path) -> None:
    """Remove a file, a link, or a directory of files."""
    if path.is_symlink() or not path.is_dir():
        disk.remove_file(path)
        return
    for entry in sorted(path.iterdir()):
        disk.remove_file(entry)
    disk.remove_directory(path)

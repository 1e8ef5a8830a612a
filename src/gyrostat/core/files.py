"""Files that users name: `read_text` reads one, `write_atomically` replaces one as a whole. `check_writable` and
`make_directory` refuse a place that cannot be written before any work is done for it.
"""

from __future__ import annotations

import os
from pathlib import Path

from gyrostat.core.errors import UsageError

OWNER_ONLY = 0o600
READABLE = 0o644


def write_atomically(path: Path, content: bytes, *, durable: bool = True, mode: int = OWNER_ONLY) -> None:
    """Replace `path` by a file with this content: readers see the old file or the complete new one.

    `durable`: it survives a power failure once this returns. If it cannot be written, the old file stays, and nothing is
    left beside it.
    """
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
    if durable:
        _sync_directory(path.parent)


def read_text(path: Path, what: str = "") -> str:
    """The content of a text file that the user named; `what` it is, for the message. Raises `UsageError`."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}".lstrip()) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not UTF-8 text: {error}".lstrip()) from error


def check_writable(path: Path, option: str) -> None:
    """Raise `UsageError` if the file that `option` names cannot be written. Leaves nothing behind."""
    try:
        if path.is_dir():
            raise UsageError(f"{option} {path} cannot be written: that is a directory")
        if not path.parent.is_dir():
            raise UsageError(f"{option} {path} cannot be written: there is no directory {path.parent}")
        _try_a_file(path.parent)
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}") from error


def make_directory(path: Path, option: str) -> None:
    """Make the directory that `option` names, unless it exists. Raises `UsageError` if files cannot be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try_a_file(path)
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be used as a directory: {error.strerror}") from error


def _try_a_file(directory: Path) -> None:
    """Permissions are not enough: no file can be made in /proc, for example."""
    probe = directory / f".{os.urandom(4).hex()}"
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY))
    probe.unlink()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Unix sockets at paths of any length.

The kernel accepts paths of at most 107 bytes, and directory names alone are often longer. For a longer path, the directory is
opened and the socket reached through /proc/self/fd.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_PATH = 107


def bind_at(path: Path | str) -> socket.socket:
    """A socket bound to `path`, not yet listening."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as address:
            listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_to(path: Path | str) -> socket.socket:
    """A socket connected to `path`; OSError if no process listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as address:
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def _short(path: Path | str) -> Iterator[str]:
    if len(os.fsencode(path)) <= _MAX_PATH:
        yield os.fspath(path)
        return
    directory, name = os.path.split(os.fspath(path))
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{file}/{name}"
    finally:
        os.close(file)

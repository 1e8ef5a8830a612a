"""Lets two processes take turns. Each has a named pipe; a byte in it means that it is its turn."""

from __future__ import annotations

import os
from pathlib import Path

_GO = b"."
_FREE = b"*"


def make(directory: Path, names: tuple[str, str]) -> None:
    for name in names:
        os.mkfifo(directory / name)


def free(directory: Path, name: str) -> None:
    """Let a process go on without ever waiting for the other again; also works if it does not wait, or has exited."""
    pipe = os.open(directory / name, os.O_RDWR)
    try:
        os.write(pipe, _FREE)
    finally:
        os.close(pipe)


class TurnTaking:
    """The side of one of the two processes."""

    def __init__(self, directory: Path, mine: str, other: str) -> None:
        self._mine, self._other = (os.open(directory / name, os.O_RDWR) for name in (mine, other))
        self._free = False

    def pass_on(self) -> None:
        """Give the turn to the other process; returns when it is this one's turn again."""
        os.write(self._other, _GO)
        if not self._free:
            self._free = os.read(self._mine, 1) == _FREE

    def leave(self) -> None:
        """Take no more turns: the other process does not wait any more."""
        os.write(self._other, _FREE)
        os.close(self._mine)
        os.close(self._other)

"""Two processes that take turns. A pipe with a name stands before each; a byte in it says: go on."""

from __future__ import annotations

import os
from pathlib import Path

_GO = b"."
_FREE = b"*"


def make(directory: Path, names: tuple[str, str]) -> None:
    for name in names:
        os.mkfifo(directory / name)


def free(directory: Path, name: str) -> None:
    """Let one go on without waiting for the other ever again; also if it waits for nothing, or has gone."""
    pipe = os.open(directory / name, os.O_RDWR)
    try:
        os.write(pipe, _FREE)
    finally:
        os.close(pipe)


class TurnTaking:
    """One of the two."""

    def __init__(self, directory: Path, mine: str, other: str) -> None:
        self._mine, self._other = (os.open(directory / name, os.O_RDWR) for name in (mine, other))
        self._free = False

    def pass_on(self) -> None:
        """It is the other's turn; returns when it is ours again."""
        os.write(self._other, _GO)
        if not self._free:
            self._free = os.read(self._mine, 1) == _FREE

    def leave(self) -> None:
        """The other need not wait for us any more."""
        os.write(self._other, _FREE)
        os.close(self._mine)
        os.close(self._other)

"""What servers write down of an asynchronous job whose updates are recorded (`checkpoint/record.py`).

The updates of a slot form lines: one from each instant at which a server became its owner, named by the term and the number of
the move or mirror by which it came. A line begins where another one was at some version, not always at its end: parameters
may have gone back, or an owner was lost with updates that its mirror had not got. So a line and a version name a state.
"""

from __future__ import annotations

import msgspec


class UpdateOrigin(msgspec.Struct, frozen=True, array_like=True):
    """What an update was computed from."""

    computation: str
    """Unique: a batch that is trained twice has two."""
    pulls: tuple[bytes, ...]
    """Of each pull, in the order in which the script made them: lines and versions of all slots (`line_versions`), as int64."""


class SlotOwned(msgspec.Struct, frozen=True, tag=True):
    """A server owns a slot, which has applied `version` updates."""

    term: int
    number: int
    """Of the move or mirror by which it came; 0: from a checkpoint, or new."""
    slot: int
    version: int


class UpdateAccepted(msgspec.Struct, frozen=True, tag=True):
    """Slots of this server have taken an update."""

    epoch: int
    batch: int
    origin: bytes
    slots: dict[int, int]
    """With the version of each before it."""


RecordLine = SlotOwned | UpdateAccepted


def line_of(term: int, number: int) -> int:
    """The name of a line, which leaves 32 bits for versions."""
    return (term << 51) | (number << 32)


def line_and_version(name: int) -> tuple[int, int]:
    """The inverse of line + version."""
    return name >> 32 << 32, name & 0xFFFFFFFF

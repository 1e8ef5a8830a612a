"""What servers write down of an asynchronous job whose updates are recorded (`checkpoint/record.py`)."""

from __future__ import annotations

import msgspec


class UpdateOrigin(msgspec.Struct, frozen=True, array_like=True):
    """What an update was computed from."""

    computation: str
    """Unique: a batch that is trained twice has two."""
    pulls: tuple[bytes, ...]
    """Of each pull, in the order in which the script made them: the versions of all slots, as int64."""


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

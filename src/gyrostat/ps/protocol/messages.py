"""What the coordinator and servers say to one another. Typed values, so that they can be sent."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class SlotRole(StrEnum):
    """What a slot is to a server that has it."""

    OWNER = "owner"
    FROZEN = "frozen"
    """Its owner, which is sending a copy to the next one; requests wait."""
    INCOMING = "incoming"
    """A copy that has arrived, and is not the owner yet."""
    MIRROR = "mirror"
    """A second copy, which gets every update from the owner."""


# To a server.


class AssumeTerm(msgspec.Struct, frozen=True, tag=True):
    """The term from now on. The server acknowledges with `TermAssumed`."""

    term: int
    load: dict[int, str]
    """Slots that it owns from now on, with their files of a checkpoint; empty: a slot that has applied nothing yet."""
    drop_others: bool = False
    """All other slots are dropped: they go back too, or are elsewhere."""


class MoveSlot(msgspec.Struct, frozen=True, tag=True):
    """Freeze a slot and send a copy to another server."""

    slot: int
    move: int
    target: str
    """The name of the server."""


class CancelMove(msgspec.Struct, frozen=True, tag=True):
    """The source unfreezes the slot; the target discards its copy."""

    slot: int
    move: int


class OwnSlots(msgspec.Struct, frozen=True, tag=True):
    """The server owns these slots, of which it has copies."""

    slots: dict[int, int]
    """With the number of the move or mirror by which each came."""


class DropSlot(msgspec.Struct, frozen=True, tag=True):
    """The slot is elsewhere: drop what this move or mirror has left here."""

    slot: int
    number: int


class SetMirror(msgspec.Struct, frozen=True, tag=True):
    """Send a copy of a slot to its mirror, and every update from then on. No mirror: stop doing so."""

    slot: int
    number: int
    mirror: str | None


class SaveSlot(msgspec.Struct, frozen=True, tag=True):
    """Write a slot into a file of a checkpoint, while training goes on."""

    checkpoint: int
    slot: int
    committed: int = 0
    """In ordered jobs: apply the steps before this one first, so that all files are of one step."""


class ForgetEpochs(msgspec.Struct, frozen=True, tag=True):
    """Epochs before this one are complete in the last checkpoint: drop their bitmaps."""

    before: int


ToServer = AssumeTerm | MoveSlot | CancelMove | OwnSlots | DropSlot | SetMirror | SaveSlot | ForgetEpochs


# From a server.


class TermAssumed(msgspec.Struct, frozen=True, tag=True):
    """The slots are loaded, and the server serves this term."""

    term: int


class SlotArrived(msgspec.Struct, frozen=True, tag=True):
    """A complete copy of a moving slot is here."""

    slot: int
    move: int


class MirrorReady(msgspec.Struct, frozen=True, tag=True):
    """A complete copy of a slot is here, to be its mirror."""

    slot: int
    number: int


class SlotSaved(msgspec.Struct, frozen=True, tag=True):
    """A slot is on disk."""

    checkpoint: int
    slot: int
    file: str


FromServer = TermAssumed | SlotArrived | MirrorReady | SlotSaved

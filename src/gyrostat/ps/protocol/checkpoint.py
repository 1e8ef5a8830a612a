"""A checkpoint: the shard queues and one file per slot; and one in the making. Pure."""

from __future__ import annotations

from typing import Any

import msgspec


class PsCheckpoint(msgspec.Struct, frozen=True):
    """What goes back together. The queues were taken first: what they count as reported is in every slot."""

    number: int
    """0: the beginning, without files."""
    epoch: int
    """Of the queues: all updates of earlier epochs are in every slot."""
    queues: dict[str, Any]
    files: dict[int, str]

    def file(self, slot: int) -> str:
        """Empty: the slot had applied nothing."""
        return self.files.get(slot, "")


class CheckpointInTheMaking:
    """Collects the files of slots, which come in any order."""

    def __init__(self, number: int, epoch: int, queues: dict[str, Any], slots: int) -> None:
        self.number = number
        self._epoch, self._queues, self._slots = epoch, queues, slots
        self._files: dict[int, str] = {}

    def saved(self, slot: int, file: str) -> PsCheckpoint | None:
        """The checkpoint, if this was its last file."""
        self._files.setdefault(slot, file)
        if len(self._files) < self._slots:
            return None
        return PsCheckpoint(self.number, self._epoch, self._queues, dict(sorted(self._files.items())))

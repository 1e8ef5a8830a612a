"""What the owner of a leader has asked for, and is told when it is done: checkpoints, other servers, a digest. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from gyrostat.ps.protocol.coordinator import ServerCoordinator
from gyrostat.ps.protocol.slot_map import SlotMap
from gyrostat.ps.store.slot_state import job_digest
from gyrostat.ps.wire.control import DigestSlot, SlotDigest

_numbers = count(1)
Done = Callable[[str | None], None]
"""None: it is done; else the reason why not."""


class PendingCheckpoints:
    """Those who wait for a checkpoint that was begun after their request."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Done]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, coordinator: ServerCoordinator, done: Done) -> None:
        self._waiting.append((number_after_now(coordinator), done))

    def valid(self, number: int) -> None:
        ready = [done for needed, done in self._waiting if needed <= number]
        self._waiting = [each for each in self._waiting if each[0] > number]
        for done in ready:
            done(None)

    def failed(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, []
        for _, done in waiting:
            done(reason)


def number_after_now(coordinator: ServerCoordinator) -> int:
    """The least number of a checkpoint that is begun from now on."""
    making = coordinator.making
    return (coordinator.checkpoint.number if making is None else making) + 1


@dataclass
class DigestRequest:
    """The digest of all slots. It begins anew whenever the map changes: slots may have moved or gone back."""

    done: Callable[[str], None]
    number: int = 0
    _slots: int = 1
    _version: int = -1
    _digests: dict[int, str] = field(default_factory=dict)

    def to_ask(self, slot_map: SlotMap, committed: int) -> list[tuple[str, DigestSlot]]:
        """What to send, if the map is another one."""
        if slot_map.version == self._version or None in slot_map.owners:
            return []
        self._version, self._slots = slot_map.version, len(slot_map.owners)
        self.number = next(_numbers)
        self._digests.clear()
        return [
            (owner, DigestSlot(self.number, slot, committed))
            for slot, owner in enumerate(slot_map.owners)
            if owner is not None
        ]

    def took(self, message: SlotDigest) -> bool:
        """Returns whether it was the last one; then `done` has been called."""
        if message.number == self.number:
            self._digests[message.slot] = message.digest
        if len(self._digests) < self._slots:
            return False
        self.done(job_digest(self._digests[slot] for slot in range(self._slots)))
        return True


class PendingWork:
    """All of it."""

    def __init__(self) -> None:
        self.checkpoints = PendingCheckpoints()
        self.digests: list[DigestRequest] = []
        self.scales: list[Done] = []
        self.addresses: Mapping[str, tuple[str, int]] = {}
        """Those of servers that all servers know."""

    def digests_to_ask(self, coordinator: ServerCoordinator) -> list[tuple[str, DigestSlot]]:
        if not self.digests:
            return []
        slot_map, committed = coordinator.map, coordinator.committed
        return [each for request in self.digests for each in request.to_ask(slot_map, committed)]

    def took_digest(self, message: SlotDigest) -> None:
        self.digests = [request for request in self.digests if not request.took(message)]

    def scaled(self) -> None:
        scales, self.scales = self.scales, []
        for done in scales:
            done(None)

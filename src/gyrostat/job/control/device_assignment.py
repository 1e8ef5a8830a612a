"""Which device each worker of a job sits on, where a scheduler hands out devices one by one.

Without a seating workers are numbers, and any free place will do (`gyrostat run`). With one, the job is told the complete
set of devices that it has from now on (`door.Occupy`): workers on others leave, newcomers sit down on those that are free,
in one switch. A slot carries what its device means to the process on it: its environment, and its pace if it is paced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One device as a worker is told of it."""

    device: int
    paced: float | None = None
    """Samples per second, if it waits instead of computing."""
    env: Mapping[str, str] = {}


class DeviceAssignment:
    """Changes as the job does; kept by whoever runs it."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        self._worker_ids: dict[int, Slot] = {}

    def begin(self, members: int) -> None:
        """All workers are started anew, as 0, 1, 2 …"""
        self._worker_ids = dict(enumerate(self._slots[:members]))

    def aim(self, slots: Sequence[Slot], members: Sequence[int]) -> tuple[int, ...]:
        """From now on the job has these. Returns who of its present members must leave."""
        self._slots = tuple(slots)
        self._worker_ids = {member: slot for member, slot in self._worker_ids.items() if member in members}
        devices = {slot.device for slot in slots}
        return tuple(
            member
            for member in members
            if member in self._worker_ids and self._worker_ids[member].device not in devices
        )

    def sit(self, member: int, members: Sequence[int]) -> Slot:
        """Where a worker that is started sits; `members` are those that train."""
        if member not in self._worker_ids:
            taken = {slot.device for slot in self._worker_ids.values()}
            training = {slot.device for other, slot in self._worker_ids.items() if other in members}
            free = [slot for slot in self._slots if slot.device not in taken]
            left = [
                slot for slot in self._slots if slot.device not in training
            ]  # by newcomers that came in vain
            self._worker_ids[member] = (free or left or list(self._slots))[0]
        return self._worker_ids[member]

    def devices(self, members: Sequence[int]) -> tuple[int, ...]:
        """Of these members, in their order; -1 for one that was given none."""
        return tuple(
            self._worker_ids[member].device if member in self._worker_ids else -1 for member in members
        )

    def slot(self, member: int) -> Slot | None:
        return self._worker_ids.get(member)

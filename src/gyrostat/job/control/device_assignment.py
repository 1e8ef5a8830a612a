"""Which worker runs on which device, for a job whose devices a scheduler assigns one by one.

`gyrostat run` has no device assignment. A scheduler sends the complete set of devices that a job has from now on
(`requests.Occupy`): workers on other devices leave, new workers start on the free ones, in one switch. A slot has the settings
of the process on its device: environment, and pace if it is paced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One device, with the settings of the worker on it."""

    device: int
    paced: float | None = None
    """Samples per second, if it waits instead of computing."""
    env: Mapping[str, str] = {}


class DeviceAssignment:
    """The devices of one job, and the worker on each."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        self._slot_of: dict[int, Slot] = {}

    def begin(self, members: int) -> None:
        """All workers start, as 0, 1, 2 …"""
        self._slot_of = dict(enumerate(self._slots[:members]))

    def retarget(self, slots: Sequence[Slot], members: Sequence[int]) -> tuple[int, ...]:
        """The job has these devices from now on. Returns the members that must leave."""
        self._slots = tuple(slots)
        self._slot_of = {member: slot for member, slot in self._slot_of.items() if member in members}
        devices = {slot.device for slot in slots}
        return tuple(
            member
            for member in members
            if member in self._slot_of and self._slot_of[member].device not in devices
        )

    def assign(self, member: int, members: Sequence[int]) -> Slot:
        """The slot of a worker that is started; `members` are those that train."""
        if member not in self._slot_of:
            taken = {slot.device for slot in self._slot_of.values()}
            training = {slot.device for other, slot in self._slot_of.items() if other in members}
            free = [slot for slot in self._slots if slot.device not in taken]
            # Devices of new workers that never joined.
            unused = [slot for slot in self._slots if slot.device not in training]
            self._slot_of[member] = (free or unused or list(self._slots))[0]
        return self._slot_of[member]

    def devices(self, members: Sequence[int]) -> tuple[int, ...]:
        """The devices of these members, in their order; -1 for a member without one."""
        return tuple(self._slot_of[member].device if member in self._slot_of else -1 for member in members)

    def slot(self, member: int) -> Slot | None:
        return self._slot_of.get(member)

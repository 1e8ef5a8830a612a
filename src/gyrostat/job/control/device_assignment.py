"""Which worker runs on which device, for a job whose devices a scheduler assigns one by one.

`gyrostat run` has no device assignment. A scheduler sends the complete set of devices that a job has from now on
(`requests.Occupy`): workers on other devices leave, new workers start on the free ones, in one switch. A slot has the settings
of the process on its device: environment, and pace if it is paced.

The invariant, checked after every change (`violation`): each worker is on a device of its own, one that the job has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gyrostat.core.placement import apportion_by_speed


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

    @property
    def size(self) -> int:
        """How many devices the job has: the most workers that it may have."""
        return len(self._slots)

    def retarget(self, slots: Sequence[Slot], members: Sequence[int]) -> tuple[int, ...]:
        """The job has these devices from now on. Returns the members that must leave: those on other devices, and all but one
        of those that share a device."""
        self._slots = tuple(slots)
        self._slot_of = {member: slot for member, slot in self._slot_of.items() if member in members}
        free, leaving = {slot.device for slot in slots}, []
        for member in members:
            device = self._slot_of[member].device if member in self._slot_of else None
            if device in free:
                free.discard(device)
            else:
                leaving.append(member)
        return tuple(leaving)

    def withdraw(self, devices: Sequence[int]) -> None:
        """The job does not have these devices any more."""
        self._slots = tuple(slot for slot in self._slots if slot.device not in devices)

    def on(self, devices: Sequence[int], members: Sequence[int]) -> tuple[int, ...]:
        """Those of the members that are on these devices."""
        return tuple(
            member
            for member in members
            if member in self._slot_of and self._slot_of[member].device in devices
        )

    def assign(self, member: int, members: Sequence[int]) -> Slot:
        """The slot of a worker that is started. `members`: those that the job will have then. The devices of all others, which
        leave, have left or died, are free."""
        if member not in self._slot_of:
            taken = {self._slot_of[other].device for other in members if other in self._slot_of}
            free = [slot for slot in self._slots if slot.device not in taken]
            self._slot_of[member] = (free or self._slots)[0]
        return self._slot_of[member]

    def after(self, members: Sequence[int]) -> tuple[Slot, ...]:
        """The slots of these members, which stay, and then of those that will be started on the others, in their order."""
        stay = [self._slot_of[member] for member in members]
        taken = {slot.device for slot in stay}
        return (*stay, *(slot for slot in self._slots if slot.device not in taken))

    def violation(self, members: Sequence[int]) -> str | None:
        """What must never be: two of these members share a device, or one is on a device that the job does not have. None: each
        is on a device of its own."""
        occupied, ordered = self.devices(members), [slot.device for slot in self._slots]
        if len(set(occupied)) == len(occupied) and set(occupied) <= set(ordered):
            return None
        return (
            f"workers {_join(members)} are on devices {_join(occupied)}, not each on one of {_join(ordered)}"
        )

    def devices(self, members: Sequence[int]) -> tuple[int, ...]:
        """The devices of these members, in their order; -1 for a member without one."""
        return tuple(self._slot_of[member].device if member in self._slot_of else -1 for member in members)

    def slot(self, member: int) -> Slot | None:
        return self._slot_of.get(member)


def counts_by_pace(virtual_workers: int, slots: Sequence[Slot]) -> tuple[int, ...] | None:
    """Virtual workers for the worker on each slot, by declared pace; None: as even as possible."""
    paces = [slot.paced for slot in slots if slot.paced is not None]
    if len(paces) < len(slots) or len(set(paces)) < 2 or virtual_workers < len(slots):
        return None
    return tuple(apportion_by_speed(virtual_workers, [1 / pace for pace in paces]))


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

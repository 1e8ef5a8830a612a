"""The interface of placers: a placer turns a number of devices of a type into devices, or refuses with a reason.

It records which device belongs to which part of which job. A job has up to two parts: its guaranteed allocation and its
borrowed (opportunistic) one. Placers know nothing of time, rank or policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gyrostat.core.devices import Counts, DeviceId, Devices
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.placers.preemption import Candidate


@dataclass(frozen=True, slots=True)
class DevicesPlaced:
    """A placement: all devices that this part of the job has now."""

    devices: Devices
    victims: tuple[JobId, ...] = ()
    """Jobs whose borrowed devices were reclaimed for it, all of them."""


@dataclass(frozen=True, slots=True)
class PlacementRefused:
    """Why there is no placement."""

    reason: str
    victims: tuple[JobId, ...] = ()
    """Borrowers that had been evicted before the placement failed; rare."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """The guaranteed or the borrowed part of a job's devices."""

    job: JobId
    borrowed: bool


class Placer(Protocol):
    lends: bool
    """Whether other VCs may borrow idle devices of a VC."""

    def capacity(self, vc: str) -> Counts:
        """Guaranteed devices of the VC that are available now, by type."""

    def lendable(self) -> Counts:
        """Idle devices, by type; empty if nothing is lent."""

    def place(self, request: JobRequest, counts: Counts, borrowed: bool) -> DevicesPlaced | PlacementRefused:
        """Set the number of devices of this part: start, grow or shrink it. Devices that it has are kept where possible.

        If refused, the part has not changed.
        """

    def victims_for(
        self, request: JobRequest, counts: Counts, candidates: Iterator[Candidate]
    ) -> tuple[JobId, ...] | None:
        """The `candidates` (of the same VC, the lowest rank first) whose guaranteed devices must be preempted for `place`
        to succeed; None if not even all of them make room. Changes nothing.
        """

    def restore(self, request: JobRequest, devices: Devices, borrowed: bool) -> bool:
        """Give the part exactly these devices, if they are free: a job that was running already, or a preemption that is
        undone.
        """

    def release(self, job: JobId, borrowed: bool) -> None:
        """Free all devices of the part."""

    def promote(self, request: JobRequest) -> DevicesPlaced | PlacementRefused:
        """Turn the borrowed part into a guaranteed one, if the job has no other devices: in place, or migrated."""

    def defragment(
        self, request: JobRequest, devices: Devices, borrowed: bool
    ) -> DevicesPlaced | PlacementRefused:
        """Migrate the part if that leaves larger blocks of free devices; else refuse."""

    def remove_devices(self, devices: Iterable[DeviceId]) -> list[tuple[JobPart, Devices]]:
        """Make these devices unavailable. Returns the parts that lost some, each with its remaining devices."""

    def add_devices(self, devices: Iterable[DeviceId]) -> None:
        """Make these devices available again, and free."""

    def choose_to_withdraw(self, type_: str, number: int) -> Devices:
        """This many devices of a type, or fewer, whose withdrawal disrupts least: free ones, then borrowed, then the rest."""

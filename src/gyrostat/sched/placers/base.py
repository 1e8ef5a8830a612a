"""What a placer is: it turns "so many devices of this type for that job" into devices, or says why not.

It keeps the physical side of the books: which device belongs to which part of which job. A job has up to two parts,
its share of its VC's guarantee and what it borrows. Placers know nothing of time, order or policies.
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
    """All devices that this part of the job now has."""

    devices: Devices
    victims: tuple[JobId, ...] = ()
    """Jobs whose borrowed part was taken away for it, all of it."""


@dataclass(frozen=True, slots=True)
class PlacementRefused:
    reason: str
    victims: tuple[JobId, ...] = ()
    """Borrowers that were driven out before it turned out to be in vain; seldom any."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """One of the two parts of a job."""

    job: JobId
    borrowed: bool


class Placer(Protocol):
    lends: bool
    """Whether devices that a VC does not use may be borrowed by others."""

    def capacity(self, vc: str) -> Counts:
        """What the VC is guaranteed and can have, by type, with the devices that are there now."""

    def lendable(self) -> Counts:
        """Devices that nobody uses, by type; empty if nothing is lent."""

    def place(self, request: JobRequest, counts: Counts, borrowed: bool) -> DevicesPlaced | PlacementRefused:
        """Let this part of the job have so many devices: first ones, more or fewer. What it has stays where it can.

        Refused: the part is as it was.
        """

    def victims_for(
        self, request: JobRequest, counts: Counts, candidates: Iterator[Candidate]
    ) -> tuple[JobId, ...] | None:
        """Which of the `candidates` (of the same VC, the last first) must give up their guaranteed part for `place`
        to find room; None if not even all of them are enough. Changes nothing.
        """

    def restore(self, request: JobRequest, devices: Devices, borrowed: bool) -> bool:
        """Give the part exactly these devices, if they are free (a job that ran before; an exchange that was called
        off).
        """

    def release(self, job: JobId, borrowed: bool) -> None:
        """The part holds nothing any more."""

    def promote(self, request: JobRequest) -> DevicesPlaced | PlacementRefused:
        """Turn the borrowed part into the guaranteed one, if the job holds nothing else: in place, or moved."""

    def defragment(
        self, request: JobRequest, devices: Devices, borrowed: bool
    ) -> DevicesPlaced | PlacementRefused:
        """Move the part to where it leaves the larger holes; refused if it is best where it is."""

    def remove_devices(self, devices: Iterable[DeviceId]) -> list[tuple[JobPart, Devices]]:
        """These are gone. Returns the parts that lost some, each with what it has left."""

    def add_devices(self, devices: Iterable[DeviceId]) -> None:
        """These are there again, and free."""

    def choose_to_withdraw(self, type_: str, number: int) -> Devices:
        """Devices whose loss hurts least, for those who may take so many: free ones, then borrowed, then the rest."""

"""What a job asks of a cluster. The one form in which schedulers of all clusters, traces and recordings know jobs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import NewType

from gyrostat.core.errors import UsageError

JobId = NewType("JobId", str)


class Affinity(StrEnum):
    """Whether a job waits until its devices are close together."""

    HARD = "hard"
    """It does: up to a node's size they are of one node, beyond it of as few as can hold them."""
    SOFT = "soft"
    """It would like to, but rather starts on scattered devices than waits."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job: what it needs at least, wants, and could use."""

    id: JobId
    vc: str
    """The virtual cluster (the tenant) that it belongs to."""
    submitted: float
    """Seconds on the cluster's clock."""
    devices: int
    """What its owner asked for. An inelastic job runs on exactly so many, or waits."""
    min_devices: int | None = None
    """An elastic job may be shrunk to so many; 0: it may be stopped at any time and goes on later. None: `devices`."""
    max_devices: int | None = None
    """An elastic job may grow to so many. None: `devices`."""
    types: tuple[str, ...] = ()
    """Device types that it may use, best first. Empty: any."""
    mixes_types: bool = False
    """Whether it may use several types at once."""
    virtual_workers: int | None = None
    """Its number of virtual workers, which also limits its devices. None: `devices`, or `max_devices` if that is more.
    """
    affinity: Affinity = Affinity.HARD
    priority: int = 0
    """Within its VC; more is more urgent."""
    weight: float = 1.0
    """For policies that share by weight."""
    workload: str | None = None
    """What it trains, as named by throughput tables."""
    work: float | None = None
    """How much it has to do, if its owner said so, in the units that its throughput is told in."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise UsageError(f"job {self.id} asks for {self.devices} devices; it needs at least one")
        if not 0 <= self.smallest <= self.devices <= self.largest:
            raise UsageError(
                f"job {self.id}: 0 <= min_devices <= devices <= max_devices must hold, got {self.smallest}, "
                f"{self.devices}, {self.largest}"
            )

    @property
    def smallest(self) -> int:
        return self.devices if self.min_devices is None else self.min_devices

    @property
    def largest(self) -> int:
        return self.devices if self.max_devices is None else self.max_devices

    @property
    def elastic(self) -> bool:
        return self.smallest < self.largest

    @cached_property
    def shape(self) -> Shape:
        """Jobs of one VC and shape are alike to a placer: where one does not fit, the others do not."""
        return _shape(self.devices, self.affinity, self.types)

    @cached_property
    def kind(self) -> Shape:
        """Of one shape, and devices are worth the same to them."""
        if not self.elastic:
            return self.shape
        return _shape(
            self.devices,
            self.affinity,
            self.types,
            self.smallest,
            self.largest,
            self.virtual_workers,
            self.workload,
        )


class Shape:
    """What makes jobs alike. Equal ones are the same object, found by its address: schedulers look at them often."""

    __slots__ = ("_of",)

    def __init__(self, of: tuple[object, ...]) -> None:
        self._of = of

    def __repr__(self) -> str:
        return f"Shape{self._of}"


@cache
def _shape(*of: object) -> Shape:
    return Shape(of)

"""The request of a job for devices: the same for schedulers of all clusters, traces and recordings.

File format: recordings contain the names of the fields of `JobRequest`. Do not rename them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import NewType

from gyrostat.core.errors import UsageError
from gyrostat.core.roles import ServerCapacity

JobId = NewType("JobId", str)


class Affinity(StrEnum):
    """Whether a job waits for devices that are close together."""

    HARD = "hard"
    """It waits for devices of one node or, if it is larger than a node, of as few nodes as possible."""
    SOFT = "soft"
    """It prefers such devices, but starts on scattered ones rather than wait."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job: its requested number of devices, and the limits within which it is elastic."""

    id: JobId
    vc: str
    """The virtual cluster (the tenant) that it belongs to."""
    submitted: float
    """Seconds on the cluster's clock."""
    devices: int
    """The requested number. An inelastic job runs on exactly this number, or waits."""
    min_devices: int | None = None
    """An elastic job may be shrunk to this number; 0: it may be suspended at any time. None: `devices`."""
    max_devices: int | None = None
    """An elastic job may grow to this number. None: `devices`."""
    types: tuple[str, ...] = ()
    """Device types that it may use, best first. Empty: any."""
    mixes_types: bool = False
    """Whether it may use several types at once."""
    virtual_workers: int | None = None
    """Its number of virtual workers, which also limits its devices. None: `devices`, or `max_devices` if that is more.
    """
    affinity: Affinity = Affinity.HARD
    priority: int = 0
    """Within its VC; higher is more urgent."""
    weight: float = 1.0
    """For policies that share by weight."""
    workload: str | None = None
    """What it trains, as named in throughput tables."""
    work: float | None = None
    """Total work, if known, in the units of its throughput."""
    servers: ServerCapacity | None = None
    """What its parameter servers need beside its devices; None: it has none."""

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
        """Jobs of one VC and shape are equal to a placer: if one does not fit, the others do not."""
        return _shape(self.devices, self.affinity, self.types, *self._server_shape)

    @property
    def _server_shape(self) -> tuple[ServerCapacity, ...]:
        """A job may not fit because of its servers, while others with as many devices do."""
        return () if self.servers is None else (self.servers,)

    @cached_property
    def kind(self) -> Shape:
        """Jobs of one kind have the same shape and the same gain from devices."""
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
            *self._server_shape,
        )


class Shape:
    """The properties by which jobs are grouped. Equal shapes are one object, so that comparing and hashing them is fast."""

    __slots__ = ("_of",)

    def __init__(self, of: tuple[object, ...]) -> None:
        self._of = of

    def __repr__(self) -> str:
        return f"Shape{self._of}"


@cache
def _shape(*of: object) -> Shape:
    return Shape(of)

"""Requests to the allocator, and its grants and refusals. Names are computed on first access."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gyrostat.core.errors import UsageError
from gyrostat.sched.cells.spec import MAX_PRIORITY
from gyrostat.sched.cells.spec import OPPORTUNISTIC as OPPORTUNISTIC

if TYPE_CHECKING:
    from gyrostat.sched.cells.physical import PhysicalCells


class CellAffinity(StrEnum):
    """What to do when a pod does not fit into one cell of the requested level; or, if none is requested, into one machine."""

    HARD = "hard"
    """Refuse."""
    SOFT = "soft"
    """Take a larger cell, or as a last resort any devices of the tenant."""


@dataclass(frozen=True)
class PodGroup:
    """`count` equal pods, each with `devices` devices in one cell."""

    devices: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """A gang: all of its pods are placed, or none."""

    job: str
    vc: str
    pods: tuple[PodGroup, ...]
    priority: int = 0
    device_type: str | None = None
    """None: the first type of the tenant with room."""
    affinity: CellAffinity = CellAffinity.HARD
    level: str | None = None
    """The cell type for each pod. None: the smallest that holds it, or a larger one up to a machine."""
    pinned: str | None = None
    """Only this pinned cell of the tenant."""

    def __post_init__(self) -> None:
        if not self.pods or min(min(group.devices, group.count) for group in self.pods) < 1:
            raise UsageError(
                f"job {self.job}: every group needs at least one pod and one device, got {self.pods}"
            )
        if not OPPORTUNISTIC <= self.priority <= MAX_PRIORITY:
            raise UsageError(
                f"job {self.job}: priority {self.priority}; it is 0 to {MAX_PRIORITY}, or {OPPORTUNISTIC} for opportunistic"
            )

    @cached_property
    def devices(self) -> int:
        return sum(group.devices * group.count for group in self.pods)


class GrantedCell(NamedTuple):
    """A whole cell, or device, of a pod: its physical cell, and the virtual cell of its tenant."""

    level: int
    at: int
    """Index of the physical cell in its pool."""
    root: int | None
    """The level of the tenant's cell that contains it; None for opportunistic jobs."""
    virtual: int
    """Index of the virtual cell within the tenant's cells of level `root`, or within the pinned cell of the grant."""


class PodGrant(msgspec.Struct, frozen=True, dict=True):
    """One pod's devices."""

    pool: PhysicalCells
    vc: str
    pinned: str | None
    pieces: tuple[GrantedCell, ...]
    wanted_level: int
    """The level of the cell that the pod requested, counted as in the paper: 1 is a device."""

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(
            device for piece in self.pieces for device in self.pool.devices_of(piece.level, piece.at)
        )

    @cached_property
    def physical_cells(self) -> tuple[str, ...]:
        return tuple(self.pool.name_of(piece.level, piece.at) for piece in self.pieces)

    @cached_property
    def virtual_cells(self) -> tuple[str, ...]:
        """`TENANT/TYPE[i]` is the tenant's i-th cell; the rest is the position in it. Empty for opportunistic jobs."""
        if self.pieces[0].root is None:
            return ()
        return tuple(self.pool.virtual_name(self.vc, self.pinned, piece) for piece in self.pieces)

    @cached_property
    def level(self) -> int:
        """The level of the smallest physical cell with all its devices, counted as in the paper; 0 if there is none."""
        return self.pool.common_level(self.pieces)

    @property
    def cell_type(self) -> str | None:
        return self.pool.hierarchy.types[self.level - 1] if self.level else None


class Grant(msgspec.Struct, frozen=True, dict=True):
    """A job's devices, pod by pod in the order of the request, and the jobs that were preempted for it."""

    job: str
    vc: str
    priority: int
    device_type: str
    pods: tuple[PodGrant, ...]
    preempted: tuple[str, ...]
    """Opportunistic jobs first, then jobs of lower priority of the same tenant."""

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for pod in self.pods for device in pod.devices)

    @cached_property
    def device_count(self) -> int:
        return sum(pod.pool.sizes[piece.level] for pod in self.pods for piece in pod.pieces)


@dataclass(frozen=True)
class CellRefusal:
    """Why a request was refused. Nothing has changed."""

    job: str
    reason: str
    cell_type: str | None = None
    short: int = 0
    """Number of pods without room, of the group that did not fit."""

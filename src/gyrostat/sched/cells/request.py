"""What the allocator is asked, and what it answers. Names are made only when somebody asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gyrostat.core.errors import UsageError
from gyrostat.sched.cells.spec import OPPORTUNISTIC as OPPORTUNISTIC

if TYPE_CHECKING:
    from gyrostat.sched.cells.physical import PhysicalCells


class CellAffinity(StrEnum):
    """What to do when a pod does not fit into one cell of the wanted level."""

    HARD = "hard"
    """Refuse."""
    SOFT = "soft"
    """Take a larger cell, and in the end any devices of the tenant."""


@dataclass(frozen=True)
class PodGroup:
    """So many pods alike: each with its `devices` in one cell."""

    devices: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """A gang: all of its pods, or nothing."""

    job: str
    vc: str
    pods: tuple[PodGroup, ...]
    priority: int = 0
    device_type: str | None = None
    """None takes the first type of the tenant's that has room."""
    affinity: CellAffinity = CellAffinity.HARD
    level: str | None = None
    """The cell type that each pod is to lie in. None is the smallest that holds it."""
    pinned: str | None = None
    """Only this pinned cell of the tenant."""

    def __post_init__(self) -> None:
        if not self.pods or min(min(group.devices, group.count) for group in self.pods) < 1:
            raise UsageError(
                f"job {self.job}: every group needs at least one pod and one device, got {self.pods}"
            )
        if self.priority < OPPORTUNISTIC:
            raise UsageError(
                f"job {self.job}: priority {self.priority}; it is 0 or more, or {OPPORTUNISTIC} for opportunistic"
            )

    @cached_property
    def devices(self) -> int:
        return sum(group.devices * group.count for group in self.pods)


class GrantedCell(NamedTuple):
    """A whole cell, or device, that a pod has: where it is, and which of its tenant's cells it counts as."""

    level: int
    at: int
    """Of the physical cell, in its pool."""
    root: int | None
    """The level of the tenant's cell that it lies in; None for opportunistic jobs."""
    virtual: int
    """Of the virtual cell, among those of `root`; for pinned cells, see the grant."""


class PodGrant(msgspec.Struct, frozen=True, dict=True):
    """One pod's devices."""

    pool: PhysicalCells
    vc: str
    pinned: str | None
    pieces: tuple[GrantedCell, ...]
    wanted_level: int
    """The level that it lies in one cell of, as the paper counts: 1 is a device."""

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
        """`TENANT/TYPE[i]` is the tenant's i-th cell, and what follows the place of the piece in it. Empty if opportunistic."""
        if self.pieces[0].root is None:
            return ()
        return tuple(self.pool.virtual_name(self.vc, self.pinned, piece) for piece in self.pieces)

    @cached_property
    def level(self) -> int:
        """The level of the smallest physical cell around all its devices, as the paper counts; 0 if there is none."""
        return self.pool.common_level(self.pieces)

    @property
    def cell_type(self) -> str | None:
        return self.pool.hierarchy.types[self.level - 1] if self.level else None


class Grant(msgspec.Struct, frozen=True, dict=True):
    """A job's devices, pod by pod in the order of the request, and who has to go for it."""

    job: str
    vc: str
    priority: int
    device_type: str
    pods: tuple[PodGrant, ...]
    preempted: tuple[str, ...]
    """Jobs that have lost their devices by this: opportunistic ones first, then lower priorities of the same tenant."""

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for pod in self.pods for device in pod.devices)

    @cached_property
    def device_count(self) -> int:
        return sum(pod.pool.sizes[piece.level] for pod in self.pods for piece in pod.pieces)


@dataclass(frozen=True)
class CellRefusal:
    """Nothing has changed, and why."""

    job: str
    reason: str
    cell_type: str | None = None
    short: int = 0
    """How many pods of the group that did not fit were left over."""

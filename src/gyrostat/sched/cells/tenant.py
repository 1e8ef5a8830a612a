"""A tenant's cells, and reports about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gyrostat.sched.cells.physical import PhysicalCells
from gyrostat.sched.cells.virtual import VirtualCells


@dataclass(frozen=True)
class Tenant:
    """A virtual cluster: its cells by hierarchy, smallest first, and its pinned ones by name."""

    name: str
    weight: float
    groups: dict[str, list[VirtualCells]] = field(default_factory=dict)
    pinned: dict[str, VirtualCells] = field(default_factory=dict)

    def group(self, pool: PhysicalCells, root: int, pinned: str | None) -> VirtualCells | None:
        if pinned is not None:
            return self.pinned.get(pinned)
        return next((g for g in self.groups.get(pool.hierarchy.name, ()) if g.root == root), None)

    def all_groups(self) -> Iterable[VirtualCells]:
        for groups in self.groups.values():
            yield from groups
        yield from self.pinned.values()


@dataclass(frozen=True)
class Usage:
    """A virtual cluster's cells of one type, and their use."""

    vc: str
    cell_type: str
    level: int
    pinned: str | None
    cells: int
    bound: int
    devices: int
    free_devices: int
    bad_devices: int
    """Bad devices in its bound cells."""


@dataclass(frozen=True)
class HealthChange:
    """The jobs and tenants that a change of health concerns."""

    devices: tuple[str, ...]
    """Devices that changed."""
    jobs: tuple[str, ...]
    """Jobs that run on them."""
    virtual_clusters: tuple[str, ...]
    """Tenants whose bound cells contain them."""

"""The stored state of a cluster, and the cluster rebuilt from it: after a crash, or with another specification.

A binding names machines, devices and cell types, so it is valid in another process and with another specification. With
the specification that it was made with, every job gets exactly its cells again. With another one a job keeps its devices,
and counts as other cells of its tenant if its own do not exist any more; without such cells it becomes opportunistic. No
job is stopped.

File format: the Structs below are stored. Do not rename their fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from gyrostat.sched.cells.allocator import CellCluster, locate_owner, release_cell
from gyrostat.sched.cells.physical import PhysicalCells
from gyrostat.sched.cells.request import OPPORTUNISTIC, Grant, GrantedCell, PodGrant
from gyrostat.sched.cells.spec import CellSpec
from gyrostat.sched.cells.virtual import VirtualCells


class PieceBinding(msgspec.Struct, frozen=True):
    """A cell that a pod has."""

    cell: str
    """Its type."""
    at: str
    """Its first device."""
    root: str | None = None
    """The type of the tenant's cell that contains it."""
    virtual: int = -1
    """Its number among the cells of its own type in the tenant's cells of type `root`."""


class PodBinding(msgspec.Struct, frozen=True):
    """A pod's cells, and its devices by name, which are valid with any specification."""

    pieces: tuple[PieceBinding, ...]
    devices: tuple[str, ...]
    level: int
    """The level of the cell that the pod requested, counted from 1."""


class JobBinding(msgspec.Struct, frozen=True):
    """The cells of a job."""

    job: str
    vc: str
    priority: int
    hierarchy: str
    pods: tuple[PodBinding, ...]
    pinned: str | None = None


class BadDevice(msgspec.Struct, frozen=True):
    """A bad device, and the virtual device that represents it if it is in a bound cell."""

    device: str
    virtual: int | None = None


class Bindings(msgspec.Struct, frozen=True):
    """The whole state of a cluster except its specification. Jobs are in the order of allocation."""

    jobs: tuple[JobBinding, ...]
    bad: tuple[BadDevice, ...] = ()


class BindingChange(StrEnum):
    """What another specification changes for a job."""

    REBOUND = "rebound"
    """It keeps its devices, as other cells of its tenant."""
    DOWNGRADED = "downgraded"
    """It keeps its devices, but is opportunistic now."""
    OUTSIDE = "outside"
    """Its devices are not in the cluster any more, or belong to another job. It is not counted, and not stopped here."""


@dataclass(frozen=True)
class JobChange:
    job: str
    change: BindingChange
    reason: str


def bindings_of(cluster: CellCluster) -> Bindings:
    """The state to store."""
    return Bindings(
        (*map(_stored, cluster.jobs.values()), *cluster.outside.values()),
        tuple(
            BadDevice(pool.device_name(device), _shown_as(pool, device))
            for pool in cluster.pools.values()
            for device in sorted(pool.bad_devices)
        ),
    )


def rebuild(spec: CellSpec, bindings: Bindings) -> tuple[CellCluster, list[JobChange]]:
    """The cluster that the bindings describe, and the jobs that another specification changes."""
    cluster = CellCluster(spec)
    changes: dict[str, JobChange] = {}
    order = {binding.job: place for place, binding in enumerate(bindings.jobs)}
    # Guaranteed jobs first, by descending priority: later ones may find the tenant's cells taken.
    for binding in sorted(bindings.jobs, key=lambda binding: -binding.priority):
        change = restore(cluster, binding)
        if change is not None:
            changes[binding.job] = change
    cluster.jobs = dict(sorted(cluster.jobs.items(), key=lambda item: order[item[0]]))
    for bad in bindings.bad:
        cluster.restore_bad(bad.device, bad.virtual)
    return cluster, [changes[job] for job in order if job in changes]


def reconfigured(cluster: CellCluster, spec: CellSpec) -> tuple[CellCluster, list[JobChange]]:
    """The cluster with another specification. Jobs keep their devices."""
    return rebuild(spec, bindings_of(cluster))


def _stored(grant: Grant) -> JobBinding:
    pool = grant.pods[0].pool
    types = pool.hierarchy.types
    pods = tuple(
        PodBinding(
            tuple(
                PieceBinding(
                    types[piece.level],
                    pool.device_name(piece.at * pool.sizes[piece.level]),
                    None if piece.root is None else types[piece.root],
                    piece.virtual,
                )
                for piece in pod.pieces
            ),
            pod.devices,
            pod.wanted_level,
        )
        for pod in grant.pods
    )
    return JobBinding(grant.job, grant.vc, grant.priority, pool.hierarchy.name, pods, grant.pods[0].pinned)


def _shown_as(pool: PhysicalCells, device: int) -> int | None:
    owner = locate_owner(pool, device)
    return None if owner is None else owner[0].bad_idle.get(device)


class _Place(NamedTuple):
    level: int
    at: int
    root: int | None
    virtual: int


def restore(cluster: CellCluster, binding: JobBinding) -> JobChange | None:
    """Restore one job; returns the change if it could not have exactly its cells."""
    found = _cells_of(cluster, binding) or _devices_of(cluster, binding)
    if found is None:
        cluster.outside[binding.job] = binding
        return JobChange(binding.job, BindingChange.OUTSIDE, "its devices are not in the cluster any more")
    pool, places = found
    every = [place for pod in places for place in pod]
    reason = ""
    if binding.priority != OPPORTUNISTIC:
        for exact in (True, False):
            placed = _guarantee(cluster, pool, binding, every, exact)
            if placed is not None:
                pinned = binding.pinned if exact else None
                cluster.record(_grant(pool, binding, binding.priority, pinned, _by_pod(places, placed)))
                if exact:
                    return None
                return JobChange(
                    binding.job, BindingChange.REBOUND, f"it counts as other cells of {binding.vc} now"
                )
        reason = f"{binding.vc} has no free cells for its devices; "
    if not all(pool.idle.is_free(place.level, place.at) for place in every):
        cluster.outside[binding.job] = binding
        return JobChange(binding.job, BindingChange.OUTSIDE, reason + "its devices belong to another job")
    apart = [
        [GrantedCell(*cell, None, -1) for cell in pool.split_at_bounds([(p.level, p.at) for p in pod])]
        for pod in places
    ]
    for pieces in apart:
        for piece in pieces:
            pool.lend(piece.level, piece.at, binding.job)
    cluster.record(_grant(pool, binding, OPPORTUNISTIC, None, apart))
    if binding.priority == OPPORTUNISTIC:
        return None
    return JobChange(binding.job, BindingChange.DOWNGRADED, reason + "it is opportunistic now")


def _cells_of(cluster: CellCluster, binding: JobBinding) -> tuple[PhysicalCells, list[list[_Place]]] | None:
    """The cells of a binding in this cluster, if all exist with the same devices."""
    pool = cluster.pools.get(binding.hierarchy)
    if pool is None:
        return None
    types = pool.hierarchy.types
    result = []
    for pod in binding.pods:
        places, devices = [], 0
        for piece in pod.pieces:
            if piece.cell not in types or (piece.root is not None and piece.root not in types):
                return None
            level = types.index(piece.cell)
            first = pool.layout.locate(pool.hierarchy, 0, piece.at)
            if first is None or first % pool.sizes[level]:
                return None
            root = None if piece.root is None else types.index(piece.root)
            places.append(_Place(level, first // pool.sizes[level], root, piece.virtual))
            devices += pool.sizes[level]
        now = (name for place in places for name in pool.devices_of(place.level, place.at))
        if devices != len(pod.devices) or any(a != b for a, b in zip(now, pod.devices, strict=True)):
            return None
        result.append(places)
    return pool, result


def _devices_of(cluster: CellCluster, binding: JobBinding) -> tuple[PhysicalCells, list[list[_Place]]] | None:
    """The devices of a binding one by one, if all of them are in one pool of this cluster."""
    for pool in cluster.pools.values():
        located = [
            [pool.layout.locate(pool.hierarchy, 0, device) for device in pod.devices] for pod in binding.pods
        ]
        if all(device is not None for pod in located for device in pod):
            return pool, [
                [_Place(0, device, None, -1) for device in pod if device is not None] for pod in located
            ]
    return None


def _guarantee(
    cluster: CellCluster, pool: PhysicalCells, binding: JobBinding, places: Iterable[_Place], exact: bool
) -> list[GrantedCell] | None:
    """Restore the job in cells of its tenant: exactly its own, or any. None, and no change, if they are not free."""
    tenant = cluster.tenants.get(binding.vc)
    if tenant is None:
        return None
    done: list[tuple[VirtualCells, GrantedCell]] = []
    for place in places:
        found: tuple[VirtualCells, int] | None = None
        if exact and place.root is not None:
            group = tenant.group(pool, place.root, binding.pinned)
            found = None if group is None else _bind_same(group, place)
        elif not exact:
            groups = tenant.groups.get(pool.hierarchy.name, [])
            found = next((fit for group in groups if (fit := _bind_other(group, place))), None)
        if found is None:
            for group, piece in reversed(done):
                release_cell(group, piece.level, piece.virtual, piece.at)
            return None
        group, virtual = found
        group.users[virtual * group.sizes[place.level] // group.sizes[-1]] += 1
        group.hold(place.level, virtual, binding.job, binding.priority)
        pool.use(place.level, place.at, binding.job)
        done.append((group, GrantedCell(place.level, place.at, group.root, virtual)))
    return [piece for _, piece in done]


def _bind_same(group: VirtualCells, place: _Place) -> tuple[VirtualCells, int] | None:
    """The virtual cell that the binding names, if the physical one can be bound to it."""
    pool, (level, at, _, virtual) = group.pool, place
    ratio = group.sizes[-1] // group.sizes[level] if level <= group.root else 0
    if not ratio or not 0 <= virtual // ratio < group.count or not pool.idle.is_free(level, at):
        return None
    root, around = virtual // ratio, at // ratio
    fresh = group.physical[group.root][root] < 0
    if fresh:
        if not pool.may_bind(group.root, around):
            return None
        group.bind_root(root, around)
    if group.views[0].is_free(level, virtual) and group.pin_path(level, virtual, at):
        return group, virtual
    if fresh:
        group.unbind_root(root)
    return None


def _bind_other(group: VirtualCells, place: _Place) -> tuple[VirtualCells, int] | None:
    """A virtual cell of the group that the physical one can be bound to."""
    pool, (level, at, _, _) = group.pool, place
    if level > group.root or not pool.idle.is_free(level, at):
        return None
    around = at // (group.sizes[-1] // group.sizes[level])
    owner = pool.owners[group.root].get(around)
    fresh = owner is None
    if owner is None:
        if group.bound == group.count or not pool.may_bind(group.root, around):
            return None
        owner = (group, group.physical[group.root].index(-1))
        group.bind_root(owner[1], around)
    elif owner[0] is not group:
        return None
    virtual = group.virtual_for(level, at, owner[1])
    if virtual is not None and group.views[0].is_free(level, virtual):
        return group, virtual
    if virtual is not None:
        group.unpin(level, virtual)
    if fresh:
        group.unbind_root(owner[1])
    return None


def _by_pod(places: list[list[_Place]], pieces: list[GrantedCell]) -> list[list[GrantedCell]]:
    """The pieces, pod by pod."""
    rest = iter(pieces)
    return [[next(rest) for _ in pod] for pod in places]


def _grant(
    pool: PhysicalCells, binding: JobBinding, priority: int, pinned: str | None, pods: list[list[GrantedCell]]
) -> Grant:
    grants = tuple(
        PodGrant(pool, binding.vc, pinned, tuple(pieces), pod.level)
        for pieces, pod in zip(pods, binding.pods, strict=True)
    )
    return Grant(binding.job, binding.vc, priority, pool.hierarchy.device_type, grants, ())

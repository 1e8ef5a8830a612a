"""Placement of a tenant's pods in its own virtual cells, and binding of the cells used. Other tenants do not matter."""

from __future__ import annotations

from typing import NamedTuple

from gyrostat.sched.cells.forest import Cell, Forest
from gyrostat.sched.cells.request import CellAffinity, CellRequest
from gyrostat.sched.cells.virtual import VirtualCells


class PlannedCell(NamedTuple):
    """A virtual cell of a plan."""

    group: VirtualCells
    level: int
    at: int


class PlannedPod(NamedTuple):
    """A pod to place: its number in the request and its devices."""

    number: int
    devices: int
    level: int
    """The level of the cell that it should have."""
    limit: int
    """The largest level of a cell that it may have: that of a machine, unless the request says otherwise."""


class NoRoom(NamedTuple):
    """Why there is no plan: the first pod without room, and the number of equal pods left."""

    pod: PlannedPod
    short: int


def plan_pods(
    request: CellRequest, groups: list[VirtualCells], pods: list[PlannedPod]
) -> list[list[PlannedCell]] | NoRoom:
    """Virtual cells for every pod: without preemption if possible, else preempting the lowest priorities."""
    plan = _plan_seen_by(0, request, groups, pods)
    if not request.priority or not isinstance(plan, NoRoom):
        return plan
    lower = {held for group in groups for held in group.priorities if held < request.priority}
    for priority in sorted(lower):
        plan = _plan_seen_by(priority + 1, request, groups, pods)
        if not isinstance(plan, NoRoom):
            break
    return plan


def _plan_seen_by(
    priority: int, request: CellRequest, groups: list[VirtualCells], pods: list[PlannedPod]
) -> list[list[PlannedCell]] | NoRoom:
    """The plan if all jobs below this priority were preempted."""
    if len(pods) == 1:
        placed = _place(priority, request.affinity, groups, pods[0], 0)
        return NoRoom(pods[0], 1) if placed is None else [placed]
    plan: list[list[PlannedCell]] = []
    failed = None
    left = request.devices
    for place, pod in enumerate(pods):
        placed = _place(priority, request.affinity, groups, pod, left)
        left -= pod.devices
        if placed is None:
            failed = NoRoom(pod, sum(1 for other in pods[place:] if other.devices == pod.devices))
            break
        plan.append(placed)
    for group, level, index in (piece for placed in reversed(plan) for piece in reversed(placed)):
        group.views[priority].give(level, index)
    return failed or plan


def _place(
    priority: int, affinity: CellAffinity, groups: list[VirtualCells], pod: PlannedPod, left: int
) -> list[PlannedCell] | None:
    """Cells for one pod of a gang with `left` devices still to place. They are taken, so that the next pod gets others;
    not if it is the only pod (0 left).

    Of the cells of its limit, the one that is used most: large cells stay whole, and few cells are bound. Of unused ones, the
    smallest into which the rest of the gang fits. Within that one, the smallest cell with room.
    """
    best: tuple[tuple[int, bool, int, int], Cell, VirtualCells] | None = None
    devices = pod.devices
    for level in range(pod.limit, groups[-1].root + 1 if affinity is CellAffinity.SOFT else pod.limit + 1):
        for group in groups:
            outer = min(level, group.root)
            size = group.sizes[outer]
            if outer >= pod.level and devices <= size:
                room = group.view(priority).find(outer, devices)
                if room is not None:
                    too_small = size < left
                    rank = (min(room.free, size) - size, too_small, -size if too_small else size, room.block)
                    if best is None or rank < best[0]:
                        best = (rank, Cell(outer, room.at), group)
        if best is not None:
            _, cell, group = best
            forest = group.views[priority]
            pieces = forest.carve(*forest.closest(*cell, devices), devices)
            if left:
                _take_all(forest, pieces)
            return [PlannedCell(group, *piece) for piece in pieces]
    return _scatter(priority, groups, devices, not left) if affinity is CellAffinity.SOFT else None


def _scatter(
    priority: int, groups: list[VirtualCells], devices: int, alone: bool
) -> list[PlannedCell] | None:
    """Any free devices of the tenant, from the cells with most of them."""
    if sum(group.view(priority).left for group in groups) < devices:
        return None
    placed: list[PlannedCell] = []
    while devices:
        rooms = [
            (room.free, -at, room, group)
            for at, group in enumerate(groups)
            if (room := group.views[priority].fullest())
        ]
        _, _, room, group = max(rooms, key=lambda found: found[:2])
        share = min(devices, room.free)
        pieces = group.views[priority].carve(group.root, room.at, share)
        _take_all(group.views[priority], pieces)
        placed += [PlannedCell(group, *piece) for piece in pieces]
        devices -= share
    if alone:
        for group, level, index in reversed(placed):
            group.views[priority].give(level, index)
    return placed


def _take_all(forest: Forest, pieces: list[Cell]) -> None:
    for level, index in pieces:
        forest.take(level, index)


def bind_roots(plan: list[list[PlannedCell]], bound: list[tuple[VirtualCells, int]]) -> bool:
    """Bind the tenant's cells that the plan uses to physical ones. True if one of these has bad devices."""
    bad = False
    for pod in plan:
        for group, level, index in pod:
            root = index // (group.sizes[-1] // group.sizes[level])
            if group.physical[group.root][root] < 0:
                physical = group.pool.choose(group.root)
                if physical is None:
                    physical = group.pool.choose_any(group.root)
                bad |= group.bind_root(root, physical)
                bound.append((group, root))
    return bad


def unbind_unused(bound: list[tuple[VirtualCells, int]]) -> None:
    for group, root in reversed(bound):
        if not group.users[root]:
            group.unbind_root(root)

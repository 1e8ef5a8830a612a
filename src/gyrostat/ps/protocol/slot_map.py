"""Slots → servers, with a version; and which slots should move so that servers have an even load. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class SlotMap(msgspec.Struct, frozen=True):
    """What a worker needs to know to find every slot."""

    version: int
    term: int
    owners: tuple[str | None, ...]
    """By slot, the name of its server; None: its server is lost, and it is being restored."""
    addresses: dict[str, tuple[str, int]]
    """By name of the server: host and port."""

    def by_server(self, slots: Sequence[int]) -> dict[str, list[int]]:
        """These slots by server, without those that have none now."""
        found: dict[str, list[int]] = {}
        for slot in slots:
            owner = self.owners[slot]
            if owner is not None:
                found.setdefault(owner, []).append(slot)
        return found


class PlannedMove(msgspec.Struct, frozen=True):
    slot: int
    source: str
    target: str


def plan_moves(
    owners: Sequence[str | None],
    servers: Mapping[str, float],
    loads: Sequence[float] | None = None,
) -> list[PlannedMove]:
    """The moves after which no single move would make the most loaded server less so.

    `servers`: the servers that should own slots, with their cores. Slots of other servers move away first. `loads`: by
    slot, such as its busy time; without them all are equal. Ties are broken by the servers' order and the slots' numbers.
    """
    if not servers:
        return []
    weights = [1.0] * len(owners) if loads is None else list(loads)
    slots: dict[str, list[int]] = {name: [] for name in servers}
    homeless: list[tuple[int, str]] = []
    for slot, owner in enumerate(owners):
        if owner in slots:
            slots[owner].append(slot)
        elif owner is not None:
            homeless.append((slot, owner))

    def load(name: str, more: float = 0.0) -> float:
        return (sum(weights[slot] for slot in slots[name]) + more) / servers[name]

    moves: dict[int, PlannedMove] = {}
    for slot, owner in sorted(homeless, key=lambda each: (-weights[each[0]], each[0])):
        target = min(servers, key=lambda name: load(name, weights[slot]))
        slots[target].append(slot)
        moves[slot] = PlannedMove(slot, owner, target)
    while True:
        busiest, idlest = max(servers, key=load), min(servers, key=load)
        gain = [slot for slot in slots[busiest] if load(idlest, weights[slot]) < load(busiest) - 1e-9]
        if not gain:
            return [moves[slot] for slot in sorted(moves) if moves[slot].source != moves[slot].target]
        # The one that leaves the larger of the two loads smallest, with the least load moved.
        best = min(
            gain,
            key=lambda slot: (
                max(load(idlest, weights[slot]), load(busiest, -weights[slot])),
                weights[slot],
                slot,
            ),
        )
        slots[busiest].remove(best)
        slots[idlest].append(best)
        moves[best] = PlannedMove(best, moves[best].source if best in moves else busiest, idlest)


def assign(
    slots: Sequence[int], servers: Mapping[str, float], owners: Sequence[str | None]
) -> dict[int, str]:
    """An owner for each of these slots, which have none, so that servers have even numbers of slots by cores."""
    counts = {name: sum(owner == name for owner in owners) for name in servers}
    chosen: dict[int, str] = {}
    for slot in slots:
        name = min(counts, key=lambda each: (counts[each] + 1) / servers[each])
        counts[name] += 1
        chosen[slot] = name
    return chosen

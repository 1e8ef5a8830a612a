"""Slots → servers, with a version; and which slots should move so that servers have an even load. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from math import inf

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
    The leader calls it between two messages: it takes a few milliseconds for 1,000 slots.
    """
    if not servers:
        return []
    weights = [1.0] * len(owners) if loads is None else list(loads)
    shares = {name: _Share(cores) for name, cores in servers.items()}
    homeless: list[tuple[int, str]] = []
    for slot, owner in enumerate(owners):
        if owner in shares:
            shares[owner].add(weights[slot], slot)
        elif owner is not None:
            homeless.append((slot, owner))

    moves: dict[int, PlannedMove] = {}
    for slot, owner in sorted(homeless, key=lambda each: (-weights[each[0]], each[0])):
        target = min(shares, key=lambda name: shares[name].load(weights[slot]))
        shares[target].add(weights[slot], slot)
        moves[slot] = PlannedMove(slot, owner, target)
    while True:
        busiest = max(shares, key=lambda name: shares[name].load())
        idlest = min(shares, key=lambda name: shares[name].load())
        best = shares[busiest].best_for(shares[idlest])
        if best is None:
            return [moves[slot] for slot in sorted(moves) if moves[slot].source != moves[slot].target]
        weight, slot = best
        shares[busiest].remove(weight, slot)
        shares[idlest].add(weight, slot)
        moves[slot] = PlannedMove(slot, moves[slot].source if slot in moves else busiest, idlest)


class _Share:
    """The slots of one server."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._slots: list[tuple[float, int]] = []
        """Weight and number of each, ascending."""
        self._total = 0.0

    def load(self, more: float = 0.0) -> float:
        return (self._total + more) / self._cores

    def add(self, weight: float, slot: int) -> None:
        insort(self._slots, (weight, slot))
        self._total += weight

    def remove(self, weight: float, slot: int) -> None:
        del self._slots[bisect_left(self._slots, (weight, slot))]
        self._total -= weight

    def best_for(self, other: _Share) -> tuple[float, int] | None:
        """The slot that leaves the larger of the two loads smallest if it moves to `other`, with the least load moved. None: no
        slot makes the larger load smaller."""
        even = (self._total * other._cores - other._total * self._cores) / (self._cores + other._cores)
        after = bisect_right(self._slots, (even, inf))
        nearest = self._slots[
            max(0, after - 1) : after + 1
        ]  # the larger load grows with the distance to `even`
        found = [
            (max(other.load(weight), self.load(-weight)), weight)
            for weight, _ in nearest
            if other.load(weight) < self.load() - 1e-9
        ]
        if not found:
            return None
        _, weight = min(found)
        return self._slots[bisect_left(self._slots, (weight, -1))]


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

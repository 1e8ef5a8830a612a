"""Devices, their nodes, and numbers of devices by type.

A device is a number, counted through the cluster node by node: cheap to store in tuples and to compare. A `Fleet` maps a
number to its node and type. Finer topology (sockets, racks) is in `sched.cells`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gyrostat.core.errors import UsageError

DeviceId: TypeAlias = int
Devices: TypeAlias = tuple[DeviceId, ...]
"""Ascending."""
Counts: TypeAlias = Mapping[str, int]
"""Number of devices by type; types without devices are left out."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with `count` devices of one type, numbered from `first`."""

    name: str
    type: str
    first: DeviceId
    count: int

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.count)


class Fleet:
    """All nodes of a cluster, in order."""

    def __init__(self, nodes: Iterable[tuple[str, str, int]]) -> None:
        """`nodes`: name, device type and number of devices."""
        self.nodes: list[Node] = []
        self.node_of: list[int] = []
        """By device: the position of its node in `nodes`."""
        self.position: dict[str, int] = {}
        """By name: the position of a node in `nodes`."""
        for name, type_, count in nodes:
            if count < 1:
                raise UsageError(f"node {name} needs at least one device, got {count}")
            if name in self.position:
                raise UsageError(f"two nodes have the name {name}; names must be unique")
            self.position[name] = len(self.nodes)
            self.node_of.extend([len(self.nodes)] * count)
            self.nodes.append(Node(name, type_, len(self.node_of) - count, count))
        self.totals = total(self.nodes)
        """Devices by type."""

    def __len__(self) -> int:
        return len(self.node_of)

    def type_of(self, device: DeviceId) -> str:
        return self.nodes[self.node_of[device]].type

    def count(self, devices: Iterable[DeviceId]) -> dict[str, int]:
        """The number of these devices by type."""
        counts: dict[str, int] = {}
        for device in devices:
            type_ = self.nodes[self.node_of[device]].type
            counts[type_] = counts.get(type_, 0) + 1
        return counts

    def spread(self, devices: Iterable[DeviceId]) -> int:
        """The number of nodes of these devices."""
        return len({self.node_of[device] for device in devices})

    @classmethod
    def uniform(cls, type_: str, nodes: int, devices_per_node: int) -> Fleet:
        return cls((f"{type_}-{number}", type_, devices_per_node) for number in range(nodes))

    @classmethod
    def parse(cls, text: str) -> Fleet:
        """`v100:73x8,p100:2x4`: 73 nodes with 8 devices each, and 2 with 4."""
        nodes: list[tuple[str, str, int]] = []
        for part in text.split(","):
            type_, _, size = part.strip().partition(":")
            number, _, devices = size.partition("x")
            if not (type_ and number.isdigit() and devices.isdigit() and int(number) and int(devices)):
                raise UsageError(
                    f"a cluster is written TYPE:NODESxDEVICES, such as v100:73x8,p100:2x4; {part!r} in {text!r} is not"
                )
            start = sum(name.startswith(f"{type_}-") for name, _, _ in nodes)
            nodes += [(f"{type_}-{start + k}", type_, int(devices)) for k in range(int(number))]
        return cls(nodes)


def total(nodes: Sequence[Node]) -> dict[str, int]:
    """Devices of these nodes by type."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.type] = counts.get(node.type, 0) + node.count
    return counts


def format_counts(counts: Counts) -> str:
    """`8 v100 + 2 p100`, for reasons and messages."""
    return " + ".join(f"{number} {type_}" for type_, number in counts.items() if number) or "none"

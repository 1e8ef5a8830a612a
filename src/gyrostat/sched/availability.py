"""Which devices of a fleet jobs may not use: those of failed nodes, and those withdrawn for serving loads."""

from __future__ import annotations

from gyrostat.core.devices import Devices, Fleet
from gyrostat.core.errors import UsageError


class Availability:
    """Failed nodes and withdrawn devices. A device can be both: it is available again when neither holds."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._withdrawn: dict[str, Devices] = {}
        self._failed: set[str] = set()

    @property
    def withdrawn(self) -> set[int]:
        """Devices that serving loads have."""
        return {device for devices in self._withdrawn.values() for device in devices}

    def fail(self, node: str) -> Devices:
        """The devices that become unavailable."""
        self._failed.add(node)
        return self._devices_of(node)

    def recover(self, node: str) -> Devices:
        """The devices that become available."""
        self._failed.discard(node)
        withdrawn = self.withdrawn
        return tuple(device for device in self._devices_of(node) if device not in withdrawn)

    def withdrawn_count(self, type_: str) -> int:
        return len(self._withdrawn.get(type_, ()))

    def withdraw(self, type_: str, devices: Devices) -> None:
        """A serving load takes these further devices."""
        self._withdrawn[type_] = (*self._withdrawn.get(type_, ()), *devices)

    def return_to(self, type_: str, number: int) -> Devices:
        """Serving loads keep `number` devices of a type. Returns the devices that become available."""
        has = self._withdrawn.get(type_, ())
        self._withdrawn[type_] = has[:number]
        failed = {device for node in self._failed for device in self._devices_of(node)}
        return tuple(device for device in has[number:] if device not in failed)

    def _devices_of(self, node: str) -> Devices:
        if node not in self._fleet.position:
            raise UsageError(f"this cluster has no node {node!r}")
        return tuple(self._fleet.nodes[self._fleet.position[node]].devices)

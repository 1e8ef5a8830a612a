"""The servers that should exist: how many, of how many cores. A server of c cores is c processes. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gyrostat.core.errors import UsageError
from gyrostat.ps.control.status import ServerStatus
from gyrostat.ps.protocol.slot_map import SlotMap
from gyrostat.ps.wire.connection import PsConnection
from gyrostat.ps.wire.control import ServerLoad

_WINDOW = 5.0
"""Seconds over which loads are measured."""


@dataclass
class ServerRecord:
    """One process."""

    name: str
    server: str
    pid: int = 0
    connection: PsConnection | None = None
    address: tuple[str, int] | None = None
    heard: float = 0.0
    """When the leader heard of it last."""
    joined: bool = False
    """The coordinator knows it."""
    ending: bool = False
    """It was told to end."""
    loads: deque[ServerLoad] = field(default_factory=deque)

    def measured(self, load: ServerLoad) -> None:
        self.loads.append(load)
        while len(self.loads) > 2 and self.loads[1].seconds <= load.seconds - _WINDOW:
            self.loads.popleft()

    @property
    def busy(self) -> float:
        """The share of the last seconds in which it worked on requests."""
        if len(self.loads) < 2:
            return 0.0
        first, last = self.loads[0], self.loads[-1]
        return (last.busy - first.busy) / max(1e-9, last.seconds - first.seconds)


@dataclass
class ServerGroup:
    """One server."""

    name: str
    cores: int
    replaces: str | None = None
    """The server that leaves when this one has joined."""
    leaving: bool = False
    started: int = 0
    """Processes, for their names."""


class ServerFleet:
    def __init__(self) -> None:
        self.groups: dict[str, ServerGroup] = {}
        self.records: dict[str, ServerRecord] = {}
        self._made = 0

    def add(self, cores: int, replaces: str | None = None) -> list[ServerRecord]:
        """A new server: its processes, to be started."""
        self._made += 1
        group = ServerGroup(f"server-{self._made}", cores, replaces)
        self.groups[group.name] = group
        return [self.add_process(group.name) for _ in range(cores)]

    def add_process(self, server: str) -> ServerRecord:
        group = self.groups[server]
        record = ServerRecord(f"{server}/{group.started}", server)
        group.started += 1
        self.records[record.name] = record
        return record

    def remove(self, name: str) -> ServerRecord:
        """A process has ended. A server without processes that leaves is gone."""
        record = self.records.pop(name)
        group = self.groups[record.server]
        if group.leaving and not self.processes(group.name):
            del self.groups[group.name]
        return record

    def processes(self, server: str) -> list[ServerRecord]:
        return [record for record in self.records.values() if record.server == server]

    def staying(self) -> list[ServerGroup]:
        return [group for group in self.groups.values() if not group.leaving]

    @property
    def complete(self) -> bool:
        """All servers that should exist have joined, and none is leaving."""
        return all(
            not group.leaving
            and len(self.processes(group.name)) == group.cores
            and all(record.joined for record in self.processes(group.name))
            for group in self.groups.values()
        )

    def find(self, name: str) -> ServerGroup:
        group = self.groups.get(name)
        if group is None or group.leaving:
            names = ", ".join(each.name for each in self.staying())
            raise UsageError(f"there is no server {name!r}; there are {names}")
        return group

    def surplus(self, servers: int) -> Sequence[ServerGroup]:
        """Those that leave if there are to be fewer: the newest."""
        return self.staying()[servers:]

    def replaced(self) -> list[ServerGroup]:
        """Servers whose successors have joined completely."""
        found = []
        for group in self.groups.values():
            old = self.groups.get(group.replaces or "")
            processes = self.processes(group.name)
            if old is not None and not old.leaving and processes and all(each.joined for each in processes):
                found.append(old)
        return found

    def slot_loads(self, slots: int) -> list[float]:
        """By slot, its busy seconds of the last seconds."""
        loads = [0.0] * slots
        for record in self.records.values():
            if len(record.loads) >= 2:
                first, last = record.loads[0], record.loads[-1]
                for slot, seconds in last.slots.items():
                    loads[slot] = max(0.0, seconds - first.slots.get(slot, seconds))
        return loads

    def status(self, slot_map: SlotMap | None) -> tuple[ServerStatus, ...]:
        return tuple(self._status(group, slot_map) for group in self.groups.values())

    def _status(self, group: ServerGroup, slot_map: SlotMap | None) -> ServerStatus:
        records = self.processes(group.name)
        names = {record.name for record in records}
        last = [record.loads[-1] for record in records if record.loads]
        return ServerStatus(
            name=group.name,
            cores=group.cores,
            pids=tuple(record.pid for record in records),
            slots=sum(owner in names for owner in slot_map.owners) if slot_map else 0,
            rows=sum(load.rows for load in last),
            payload_bytes=sum(load.payload for load in last),
            memory_bytes=sum(load.memory for load in last),
            busy=sum(record.busy for record in records) / max(1, group.cores),
            leaving=group.leaving,
        )

"""The servers that should exist: how many, of how many cores. A server of c cores is c processes. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gyrostat.core.errors import UsageError
from gyrostat.ps.control.balance import ServerObservation
from gyrostat.ps.control.status import ServerStatus
from gyrostat.ps.protocol.slot_map import SlotMap
from gyrostat.ps.wire.connection import PsConnection
from gyrostat.ps.wire.control import RenewShards, ServerLoad

_WINDOW = 5.0
"""Seconds over which loads are measured."""
LEAST_WINDOW = 1.0


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
    waits: deque[tuple[float, float, float, int]] = field(default_factory=deque)
    """What workers have told lately: when; their seconds, the seconds they waited for it, and the number of exchanges."""

    def measured(self, load: ServerLoad) -> None:
        self.loads.append(load)
        while len(self.loads) > 2 and self.loads[1].seconds <= load.seconds - _WINDOW:
            self.loads.popleft()

    def waited(self, now: float, seconds: float, waited: float, count: int) -> None:
        self.waits.append((now, seconds, waited, count))
        while self.waits[0][0] < now - _WINDOW:
            self.waits.popleft()

    @property
    def waited_share(self) -> float:
        """Of the workers' time."""
        return sum(each[2] for each in self.waits) / max(1e-9, sum(each[1] for each in self.waits))

    @property
    def response_ms(self) -> float:
        return 1e3 * sum(each[2] for each in self.waits) / max(1, sum(each[3] for each in self.waits))

    @property
    def measured_seconds(self) -> float:
        return self.loads[-1].seconds - self.loads[0].seconds if self.loads else 0.0

    def more(self, what: str) -> float:
        """By how much a number of its load has grown over these seconds."""
        return float(getattr(self.loads[-1], what) - getattr(self.loads[0], what)) if self.loads else 0.0

    @property
    def busy(self) -> float:
        """The share of the last seconds in which it worked on requests."""
        return self.more("busy") / max(1e-9, self.measured_seconds)


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

    def waited(self, told: RenewShards, now: float) -> None:
        """How long a worker has waited for servers."""
        for name, (seconds, count) in told.waited.items():
            if name in self.records:
                self.records[name].waited(now, told.seconds, seconds, count)

    def observe(self) -> list[ServerObservation]:
        """All servers, if all of them have been measured for long enough."""
        found = [self._observe(group) for group in self.groups.values()]
        return [each for each in found if each is not None] if None not in found else []

    def _observe(self, group: ServerGroup) -> ServerObservation | None:
        records = self.processes(group.name)
        if group.leaving or len(records) != group.cores:
            return None
        if any(record.measured_seconds < LEAST_WINDOW or not record.waits for record in records):
            return None
        seconds = min(record.measured_seconds for record in records)
        busy = sum(record.more("busy") / record.measured_seconds for record in records)
        cpu = sum(record.more("cpu") / record.measured_seconds for record in records)
        slots = [
            seconds - record.loads[0].slots.get(slot, seconds)
            for record in records
            for slot, seconds in record.loads[-1].slots.items()
        ]
        return ServerObservation(
            name=group.name,
            cores=group.cores,
            seconds=seconds,
            busy=busy / group.cores,
            cpu=cpu / max(1e-9, busy),
            waited=max(record.waited_share for record in records),
            response_ms=max(record.response_ms for record in records),
            rows=sum(record.more("work") / record.measured_seconds for record in records) / group.cores,
            heaviest_slot=max(slots, default=0.0) / max(1e-9, sum(slots)),
        )

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

"""Server processes from the leader's side: they start, connect, are heard, fall silent, end. What that means for slots and
workers is decided in `leader`, through `ServerEvents`.
"""

from __future__ import annotations

import selectors
import time
from typing import Protocol

import msgspec

from gyrostat.ps.control.server_fleet import ServerFleet, ServerGroup, ServerRecord
from gyrostat.ps.control.server_processes import ServerProcesses
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.server.process import ServerProcessSettings
from gyrostat.ps.wire.connection import PsConnection
from gyrostat.ps.wire.control import EndServer, FromServerProcess, ServerLoad, ServerReady, send_control

_MOST_FAILED_STARTS = 3


class ServerEvents(Protocol):
    """What the leader hears of its server processes."""

    def server_ready(self, record: ServerRecord) -> None:
        """It listens, and can be sent messages."""

    def server_said(self, record: ServerRecord, message: FromServerProcess) -> None: ...

    def server_leaves(self, record: ServerRecord) -> None:
        """Its slots should move away; then `end` it."""

    def server_ended(self, record: ServerRecord, reason: str) -> None:
        """It is not there any more. An empty reason: it was told to end."""


class ServerManager:
    """The processes of all servers of a job."""

    def __init__(
        self, settings: PsSettings, selector: selectors.BaseSelector, token: bytes, events: ServerEvents
    ) -> None:
        self.fleet = ServerFleet()
        self.failure: str | None = None
        """Why servers cannot be started."""
        self._settings, self._token, self._events = settings, token, events
        self._processes = ServerProcesses(selector, settings.server_command, self._process_ended)
        self._failed_starts = 0
        self._leader = settings.host, 0

    # What should exist.

    def begin(self, leader: tuple[str, int]) -> None:
        """`leader`: the address at which it listens."""
        self._leader = leader
        for _ in range(self._settings.servers):
            self.add(self._settings.cores)

    def add(self, cores: int, replaces: str | None = None) -> str:
        """Start a server. Returns its name."""
        records = self.fleet.add(cores, replaces)
        for record in records:
            self._start(record)
        return records[0].server

    def grow(self, server: str) -> None:
        """One more core: another process."""
        self.fleet.find(server).cores += 1
        self._start(self.fleet.add_process(server))

    def leave(self, group: ServerGroup) -> None:
        group.leaving = True
        for record in self.fleet.processes(group.name):
            if record.joined:
                self._events.server_leaves(record)
            else:
                self.end(record.name)

    def end(self, name: str) -> None:
        """A process without slots."""
        record = self.fleet.records[name]
        record.ending = True
        if record.connection is not None:
            send_control(record.connection, EndServer())
        else:
            self._processes.kill(name)

    def close(self) -> None:
        self._processes.close()

    # What happens.

    def send(self, name: str, message: msgspec.Struct) -> None:
        record = self.fleet.records.get(name)
        if record is not None and record.connection is not None:
            send_control(record.connection, message)

    def heard(self, connection: PsConnection, name: str, message: FromServerProcess) -> None:
        record = self.fleet.records.get(name)
        if record is None or record.ending:
            return
        record.heard = time.monotonic()
        match message:
            case ServerReady(address=address, pid=pid):
                record.connection, record.address, record.pid = connection, address, pid
                self._failed_starts = 0
                self._events.server_ready(record)
            case ServerLoad():
                if record.joined:
                    record.measured(message)
            case _:
                self._events.server_said(record, message)

    def disconnected(self, connection: PsConnection, name: str, reason: str) -> None:
        record = self.fleet.records.get(name)
        if record is not None and record.connection is connection:
            self._lost(record, reason)

    def check_silent(self, now: float) -> None:
        for record in list(self.fleet.records.values()):
            if record.connection is not None and now - record.heard > self._settings.server_timeout:
                self._lost(record, f"silent for {now - record.heard:.1f} s")

    @property
    def deadline(self) -> float:
        """When the next server may be too silent."""
        heard = [record.heard for record in self.fleet.records.values() if record.connection is not None]
        return min(heard, default=float("inf")) + self._settings.server_timeout

    def _process_ended(self, name: str, code: int) -> None:
        record = self.fleet.records.get(name)
        if record is None:
            return
        if record.ending:
            self.fleet.remove(name)
            self._events.server_ended(record, "")
            return
        how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if record.connection is None:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_FAILED_STARTS:
                self.failure = f"server {name} cannot be started: {how}, {self._failed_starts} times in a row"
        self._lost(record, how)

    def _lost(self, record: ServerRecord, reason: str) -> None:
        """Its process has ended, or is given up. Another one takes its place."""
        self._processes.kill(record.name)
        if record.connection is not None:
            record.connection.close()
        if record.ending:
            return  # its end is noticed
        group = self.fleet.groups[record.server]
        self.fleet.remove(record.name)
        self._events.server_ended(record, reason)
        if not group.leaving and self.failure is None:
            self._start(self.fleet.add_process(group.name))

    def _start(self, record: ServerRecord) -> None:
        self._processes.start(
            ServerProcessSettings(
                name=record.name,
                leader=self._leader,
                token=self._token,
                host=self._settings.host,
                load_seconds=self._settings.load_seconds,
            )
        )

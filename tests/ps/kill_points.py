"""Processes that kill themselves with SIGKILL at a named point, once it is armed.

A point is armed by a file of its name. The first process that reaches the point removes the file, which only one can do, and
kills itself: every hit is certain, and counted by the test that armed it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gyrostat.ps.client.remote import RemoteServers
from gyrostat.ps.protocol.exchange import ExchangeReply
from gyrostat.ps.protocol.messages import DropSlot, OwnSlots, SaveSlot, ToServer
from gyrostat.ps.protocol.slot_server import Action, ForwardUpdate, ReadSlots, SendCopy, ToCoordinator
from gyrostat.ps.server.__main__ import main as server_main
from gyrostat.ps.server.process import ServerProcess, _Caller
from gyrostat.ps.wire.connection import PsConnection
from gyrostat.ps.wire.frames import FrameKind, PsFrame

COMMAND = (sys.executable, "-m", "tests.ps.kill_points", "server")

PUSH_AND_PULL = ("exchange received", "exchange applied")
MIGRATION = ("slot sent", "slot received", "slot owned", "slot dropped")
CHECKPOINT = ("slot copied for its file", "slot written")
RELOAD = ("files to read", "files loaded")
MIRROR = ("update forwarded", "update mirrored")
WORKER = ("worker asks", "worker exchanges", "worker has pushed", "worker reports")


class Armed:
    """The points that are armed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def arm(self, point: str) -> None:
        (self._directory / point).touch()

    def is_hit(self, point: str) -> bool:
        return not (self._directory / point).exists()

    def reach(self, point: str) -> None:
        try:
            (self._directory / point).unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class KilledServer(ServerProcess):
    armed: Armed

    def _requested(self, connection: PsConnection, frame: PsFrame) -> None:
        if frame.kind is FrameKind.EXCHANGE:
            self.armed.reach("exchange received")
        super()._requested(connection, frame)
        if frame.kind is FrameKind.COPY:
            self.armed.reach("slot received")

    def _answer(self, caller: _Caller, reply: ExchangeReply) -> None:
        self.armed.reach("exchange applied" if caller.kind is FrameKind.REPLY else "update mirrored")
        super()._answer(caller, reply)

    def _control(self, message: ToServer) -> None:
        match message:
            case OwnSlots():
                self.armed.reach("slot owned")
            case DropSlot():
                self.armed.reach("slot dropped")
            case SaveSlot():
                self.armed.reach("slot copied for its file")
        super()._control(message)

    def _act_once(self, action: Action) -> None:
        match action:
            case ReadSlots():
                self.armed.reach("files to read")
            case ToCoordinator(message=message) if type(message).__name__ == "SlotSaved":
                self.armed.reach("slot written")
            case ToCoordinator(message=message) if type(message).__name__ == "TermAssumed":
                self.armed.reach("files loaded")
        super()._act_once(action)
        match action:
            case SendCopy():
                self.armed.reach("slot sent")
            case ForwardUpdate():
                self.armed.reach("update forwarded")


class KilledWorker(RemoteServers):
    armed: Armed

    def _turn(self, timeout: float | None) -> None:
        if self._current is not None:
            self.armed.reach("worker exchanges")
        super()._turn(timeout)


if __name__ == "__main__":
    KilledServer.armed = Armed(Path(sys.argv[2]))
    server_main(KilledServer)

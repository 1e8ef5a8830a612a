"""A leader in a process of its own, which kills itself at a named point once that is armed (`kill_points`)."""

from __future__ import annotations

import selectors
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from gyrostat.ps.checkpoint.checkpoint_files import CheckpointFiles, PsManifest
from gyrostat.ps.control.leader import PsLeader
from gyrostat.ps.control.server_fleet import ServerRecord
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.control.status import PsEvent
from gyrostat.ps.protocol.messages import SlotArrived, SlotSaved
from gyrostat.ps.wire.control import FromServerProcess
from tests.ps.kill_points import Armed

POINTS = (
    "leader hears of a saved slot",
    "manifest not written",
    "manifest written",
    "leader hears of a move",
)


class LeaderSettings(msgspec.Struct, frozen=True):
    directory: str
    servers: int


class LeaderAddress(msgspec.Struct, frozen=True):
    address: tuple[str, int]
    token: bytes


class KilledFiles(CheckpointFiles):
    def write(self, manifest: PsManifest) -> None:
        Armed(self.directory).reach("manifest not written")
        super().write(manifest)
        Armed(self.directory).reach("manifest written")


class KilledLeader(PsLeader):
    def server_said(self, record: ServerRecord, message: FromServerProcess) -> None:
        armed = Armed(self._settings.directory)
        match message:
            case SlotSaved():
                armed.reach("leader hears of a saved slot")
            case SlotArrived():
                armed.reach("leader hears of a move")
        super().server_said(record, message)


class Nobody:
    def ps_event(self, event: PsEvent) -> None:
        print(f"{event.kind} {event.name} {event.reason}", file=sys.stderr)


def start_leader(directory: Path, servers: int) -> tuple[subprocess.Popen[bytes], LeaderAddress]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ps.leader_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(LeaderSettings(str(directory), servers)) + b"\n")
    process.stdin.close()
    line = process.stdout.readline()
    process.stdout.close()
    return process, msgspec.json.decode(line, type=LeaderAddress)


def main() -> None:
    mine = msgspec.json.decode(sys.stdin.buffer.readline(), type=LeaderSettings)
    directory = Path(mine.directory)
    selector = selectors.DefaultSelector()
    settings = PsSettings(directory=directory, servers=mine.servers, checkpoint_seconds=0.2)
    leader = KilledLeader(settings, selector, Nobody())
    leader._files = KilledFiles(directory, settings.keep)
    leader.begin()
    print(msgspec.json.encode(LeaderAddress(leader.address, leader.token)).decode(), flush=True)
    moved_at = 0.0
    while not leader.finished:
        leader.tick()
        status = leader.status()
        if status.settled and time.monotonic() > moved_at and all(each.slots for each in status.servers):
            leader.scale(mine.servers + len(status.servers) % 2)
            moved_at = time.monotonic() + 0.3
        for key, _ in selector.select(0.05):
            key.data()
    leader.close()


if __name__ == "__main__":
    main()

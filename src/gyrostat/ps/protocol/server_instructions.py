"""What the coordinator tells its process to do."""

from __future__ import annotations

from dataclasses import dataclass

from gyrostat.ps.protocol.checkpoint import PsCheckpoint
from gyrostat.ps.protocol.messages import ToServer


@dataclass(frozen=True)
class SendToServer:
    server: str
    message: ToServer


@dataclass(frozen=True)
class WriteManifest:
    """Make a checkpoint valid. `manifest_written` is called afterwards."""

    checkpoint: PsCheckpoint


@dataclass(frozen=True)
class StopServer:
    """A server that was asked to leave has no slots left."""

    server: str


Instruction = SendToServer | WriteManifest | StopServer

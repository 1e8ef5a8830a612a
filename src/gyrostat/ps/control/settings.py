"""`PsSettings`: what a leader has to know before any worker has come."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.ps.protocol.coordinator import ServerRecovery


@dataclass(frozen=True, kw_only=True)
class PsSettings:
    """How a job's parameter servers run."""

    servers: int = 1
    cores: int = 1
    """Processes of each server."""
    recovery: ServerRecovery = ServerRecovery.EXACT
    directory: Path
    """Of checkpoints. It exists."""
    resume: bool = True
    """Begin from the newest checkpoint in the directory, if there is one."""
    keep: int = 2
    """Checkpoints that are kept."""
    checkpoint_seconds: float = 60.0
    checkpoint_updates: int | None = None
    """A checkpoint after so many batches, too."""
    host: str = "127.0.0.1"
    server_timeout: float = 10.0
    """A server that is silent for so long is given up."""
    lease_seconds: float = 60.0
    """A worker that is silent for so long loses its shards to others."""
    load_seconds: float = 0.5
    """How often servers tell what they have done."""
    adjust_seconds: float = 60.0
    """The least time between two treatments of hot or slow servers; 0: none."""
    server_command: tuple[str, ...] = field(default=(sys.executable, "-m", "gyrostat.ps.server"))

    def __post_init__(self) -> None:
        for name in ("servers", "cores", "keep"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.checkpoint_updates is not None and self.checkpoint_updates < 1:
            raise UsageError(f"checkpoint_updates must be at least 1, got {self.checkpoint_updates!r}")
        for name in ("checkpoint_seconds", "server_timeout", "lease_seconds", "load_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise UsageError(f"{name} must be more than 0, got {value!r}")

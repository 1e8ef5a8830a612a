"""`ServerControl`: what the leader of a server job needs of its parameter servers and shard queues. `ServerJobExecutor`: what
it needs of worker processes.

`servers` implements it with `gyrostat.ps.control`. All calls are made in the thread of the event loop, and return at once; what
takes time calls `done` later, in the same thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gyrostat.core.events import EventKind
from gyrostat.core.job import Assignment
from gyrostat.core.roles import ProcessRole
from gyrostat.job.control.requests import ServerInfo
from gyrostat.job.processes.protocol import Ping, WorkerId
from gyrostat.job.server_job.poison import ShardInHand

Done = Callable[[str | None], None]
"""Called once: None if it is done, otherwise why not."""


@dataclass(frozen=True)
class ServerProgress:
    """A job's progress, by its shard queues."""

    updates: int = 0
    """Batches reported as trained, in all epochs."""
    samples: int = 0
    epoch: int = 0
    opened: bool = False
    """A worker's script has said what the servers hold."""


@dataclass(frozen=True, kw_only=True)
class ServersHappened:
    """Something happened to servers, slots or checkpoints."""

    kind: EventKind
    reason: str
    role: ProcessRole | None = ProcessRole.SERVER
    before: int | None = None
    """Servers."""
    after: int | None = None
    pause_ms: float | None = None
    recovered_from: str | None = None
    evidence: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ServersCheckpointed:
    """A checkpoint is in place."""

    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ScriptLogged:
    """A worker called `job.log`."""

    step: int
    metrics: dict[str, float]


FromServers = ServersHappened | ServersCheckpointed | ScriptLogged


class ServerControl(Protocol):
    @property
    def address(self) -> tuple[str, int]: ...

    @property
    def token(self) -> bytes: ...

    @property
    def progress(self) -> ServerProgress: ...

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint that it began with."""

    @property
    def refused(self) -> Sequence[str]:
        """Checkpoints that could not be used, with reasons."""

    @property
    def failure(self) -> str | None:
        """Why the servers cannot go on; the job ends with it."""

    @property
    def settled(self) -> bool:
        """No slot moves or is being saved, and each has its copy on another server, if it should."""

    def begin(self) -> None:
        """Start the server processes."""

    def tick(self, now: float) -> None: ...

    def deadline(self) -> float | None: ...

    def servers(self) -> tuple[ServerInfo, ...]: ...

    def worker_lost(self, worker: str) -> None:
        """Its process has ended: what it holds goes back."""

    def held_by(self, worker: str) -> ShardInHand | None: ...

    def scale(self, servers: int, done: Done) -> None:
        """Add or remove servers; `done` when slots are in place."""

    def checkpoint(self, done: Done) -> None: ...

    def digest(self, done: Callable[[str], None]) -> None:
        """Of all tables and tensors. When all workers have ended."""

    def close(self) -> None:
        """End all server processes."""


class ServerJobExecutor(Protocol):
    """Carries out what concerns worker processes."""

    def start(self, worker_id: WorkerId, assignment: Assignment) -> None: ...

    def tell(self, worker_id: WorkerId, message: Ping) -> None: ...

    def signal(self, worker_id: WorkerId, number: int) -> None: ...

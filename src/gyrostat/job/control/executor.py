"""`WorkerExecutor`: carries out a leader's decisions, wherever the workers are. On one machine the `launcher` implements it,
on several the `node_registry`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from gyrostat.core.errors import GyrostatError
from gyrostat.core.job import Assignment
from gyrostat.core.phase import JobPhase
from gyrostat.core.placement import Placement
from gyrostat.job.control.coordinator_record import CoordinatorRecord
from gyrostat.job.control.replies import Result
from gyrostat.job.control.restarts import Restarts
from gyrostat.job.control.shard_service import QueuesRecord
from gyrostat.job.diagnostics.poison import Death
from gyrostat.job.processes.protocol import WorkerId


class RecordRefused(GyrostatError):
    """The leader's record can never be kept as it is."""


class ZeroScaleRequest(msgspec.Struct, frozen=True):
    """A request to suspend the job (0 workers), or to resume it on `workers` workers."""

    request: str
    workers: int


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a leader's state that the next leader cannot learn from the workers."""

    format: int = 2
    attempt: int
    phase: JobPhase
    restarts: Restarts
    deaths: tuple[Death, ...]
    virtual_workers: int
    placement: Placement
    """As the attempt began, or as the suspended job last was."""
    schedule: tuple[tuple[int, int], ...]
    coordinator: CoordinatorRecord | None
    """None: the job has no workers."""
    step: int
    """Complete when it was suspended."""
    zero_scale: ZeroScaleRequest | None
    """The request that suspends or resumes it."""
    answered: dict[str, Result]
    shards: dict[str, QueuesRecord]


class WorkerExecutor(Protocol):
    def start(self, worker_id: WorkerId, assignment: Assignment) -> None:
        """Start a worker."""

    def tell(self, worker_id: WorkerId, message: msgspec.Struct) -> None:
        """Send a message. Nothing happens if the worker has exited; its exit is reported."""

    def signal(self, worker_id: WorkerId, number: int) -> None:
        """Send a signal."""

    def reaches(self, worker_id: WorkerId) -> bool:
        """False: the worker's agent is away, and messages wait for the next one."""

    def store(self, attempt: int, generation: int) -> str:
        """The rendezvous of a generation's members."""

    def traces(self, attempt: int) -> Path | None:
        """The directory of the workers' parts of a trace."""

    def keep(self, record: Callable[[], LeaderRecord]) -> bool:
        """Keep the record for the next leader, if there can be one. False: not possible now; raises `RecordRefused` if it never
        will be."""

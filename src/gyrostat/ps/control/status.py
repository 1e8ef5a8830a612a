"""What a leader shows: events as they happen, and the present state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class PsEventKind(StrEnum):
    SERVER_JOINED = "server joined"
    SERVER_LEFT = "server left"
    SERVER_LOST = "server lost"
    SERVER_TREATED = "server treated"
    """A hot or slow server: what is done about it, and the evidence."""
    SERVER_PROBLEM = "server problem"
    ROLLED_BACK = "rolled back"
    """Parameters and queues have gone back to the last checkpoint."""
    CHECKPOINT = "checkpoint"
    """It is valid: the manifest is `reason`, its number and seconds are in `numbers`."""
    CHECKPOINT_FAILED = "checkpoint failed"
    WORKER_JOINED = "worker joined"
    WORKER_LEFT = "worker left"
    WORKER_LOST = "worker lost"
    EPOCH_OVER = "epoch over"
    LOG = "log"
    """Metrics of the script."""


@dataclass(frozen=True, kw_only=True)
class PsEvent:
    kind: PsEventKind
    name: str = ""
    """Of the server or worker."""
    reason: str = ""
    evidence: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    updates: int = 0
    """Batches reported as trained before it."""


class PsObserver(Protocol):
    def ps_event(self, event: PsEvent) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    """One server: all of its processes together."""

    name: str
    cores: int
    pids: tuple[int, ...]
    slots: int
    rows: int
    payload_bytes: int
    memory_bytes: int
    busy: float
    """Of its cores, the share that worked on requests, lately."""
    leaving: bool


@dataclass(frozen=True, kw_only=True)
class PsWorkerStatus:
    name: str
    samples: int
    """Reported by it."""
    samples_per_second: float | None
    silent_seconds: float


@dataclass(frozen=True, kw_only=True)
class PsStatus:
    servers: tuple[ServerStatus, ...]
    workers: tuple[PsWorkerStatus, ...] = ()
    term: int = 0
    version: int = 0
    """Of the map."""
    moving: int = 0
    """Slots that move, or wait for it."""
    settled: bool = False
    """Nothing moves or is being saved, and every slot has its mirror, if it should."""
    epoch: int = 0
    todo: int = 0
    """Samples of the epoch."""
    doing: int = 0
    done: int = 0
    updates: int = 0
    samples: int = 0
    """Reported in this run, in all epochs; goes back with the queues."""
    checkpoint: int = 0
    """The number of the last valid one; 0: none."""

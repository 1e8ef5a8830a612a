"""`ParameterServers`: what the training script's side needs of a job's servers and its leader.

Every call blocks until it is answered, however many servers move, die and return meanwhile. `TermOver` is the one thing that a
caller has to handle: parameters and queues have gone back together, so what was computed since is void.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gyrostat.data.shards.messages import EpochOver, Shard
from gyrostat.ps.protocol.data_spec import DataSpec as DataSpec
from gyrostat.ps.protocol.evaluation import EvaluationKey
from gyrostat.ps.protocol.exchange import BatchRange
from gyrostat.ps.store.hashing import Keys, Rows
from gyrostat.ps.store.ledger import Flags, Versions
from gyrostat.ps.store.spec import StoreSpec


class TermOver(Exception):
    """The queues and parameters have gone back. Drop the shard and its updates, and ask for another one."""


@dataclass(frozen=True)
class Batch:
    """Names an update: (epoch, first sample // batch size)."""

    epoch: int
    number: int


@dataclass(frozen=True)
class WholeUpdate:
    """The gradients of one batch, for all slots. The client divides it among servers."""

    batch: Batch
    rows: Mapping[int, tuple[Keys, Rows]] = field(default_factory=dict)
    """By number of the table: distinct ascending keys and their gradients."""
    dense: Mapping[int, Rows] = field(default_factory=dict)
    """By number of the tensor: one row per slot."""
    origin: bytes = b""
    """If updates are recorded: what it was computed from (`record.py`)."""


@dataclass(frozen=True)
class Pull:
    """What to read."""

    rows: Mapping[int, Keys] = field(default_factory=dict)
    """By number of the table: distinct ascending keys."""
    dense: tuple[int, ...] = ()


@dataclass(frozen=True)
class PulledValues:
    rows: Mapping[int, Rows]
    dense: Mapping[int, Rows]
    duplicates: int = 0
    """Slots that had the pushed update already."""
    versions: Versions = field(default_factory=lambda: np.zeros(0, np.int64))
    """If updates are recorded: how many updates each slot had applied at the pull."""


@dataclass(frozen=True)
class WorkerProgress:
    """A job's progress, as of the leader's last answer."""

    updates: int = 0
    """Batches reported as trained, in all epochs."""
    epoch: int = 0
    committed: int = 0
    """Of ordered jobs: steps whose batches are all reported."""
    is_main: bool = True
    """This is the oldest worker that lives."""


class ParameterServers(Protocol):
    """A job's servers and shard queues."""

    @property
    def progress(self) -> WorkerProgress:
        """Known before `open`, too: the job may have been running for long."""

    def open(self, spec: StoreSpec, data: DataSpec) -> None:
        """Begin. All workers bring the same; the first one decides, and another one is refused (`UsageError`)."""

    def begin_dense(self, values: Mapping[int, Rows]) -> None:
        """Initial values of the dense tensors, by number: one row per slot. Those that have values keep them."""

    def exchange(self, push: WholeUpdate | None, pull: Pull) -> PulledValues:
        """Push an update to all slots, then read: one round trip per server. Raises `TermOver`."""

    def which_applied(self, batches: BatchRange) -> Flags:
        """Of each batch, whether all slots have it. Raises `TermOver`."""

    def next_shard(self, epoch: int) -> Shard | EpochOver:
        """The next shard of this epoch for this worker; waits while others hold the last ones. The shard may be of an earlier
        epoch: the queues have gone back."""

    def report(self, shard: Shard, samples: int) -> None:
        """The first `samples` samples of a shard are trained: all slots have acknowledged their batches. Raises `TermOver`."""

    def evaluate_next(self, key: EvaluationKey, items: int, part_size: int) -> range | None:
        """A part of an evaluation for this worker; None: all parts have results. Waits until the epoch is over, and while
        others hold the last parts."""

    def evaluate_report(self, key: EvaluationKey, part: range, result: bytes) -> None:
        """The result of one part."""

    def evaluate_results(self, key: EvaluationKey) -> list[bytes]:
        """All results, in the order of parts. Equal on all workers."""

    def save(self) -> None:
        """Request a checkpoint, and wait until it is valid."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the script, for the job's events."""

    def digest(self) -> str:
        """The digest of all rows, dense values and optimizer state. Equal content gives equal digests, on any servers."""

    def close(self) -> None:
        """This worker has finished its script; what it holds is returned."""

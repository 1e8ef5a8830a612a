"""The roles of a job's processes, and what each needs. A job without servers has workers only.

Workers of a server job take devices, like those of any job; its servers take cores and memory that a cluster has beside them.
The same for `gyrostat run`, a cluster's `JobSpec` and its scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from gyrostat.core.errors import UsageError

MOST_SERVERS = 1 << 10
MOST_CORES = 256


class ProcessRole(StrEnum):
    """File format: the values are in reports and in the REST API."""

    WORKER = "worker"
    SERVER = "server"


class ServerRecovery(StrEnum):
    """What happens when a parameter server is lost."""

    EXACT = "exact"
    """All slots and the queues go back to the last checkpoint."""
    PARTIAL = "partial"
    """The slots of the lost server and the queues go back."""
    REPLICA = "replica"
    """Its slots' mirrors take over, and nothing goes back; if a mirror is missing too, as `exact`."""


@dataclass(frozen=True, kw_only=True)
class ServerCapacity:
    """Cores and memory for parameter servers: what a job's servers need, or a tenant has for them."""

    cores: int = 0
    memory: int | None = None
    """Bytes; None: not stated, and not limited."""

    def fits(self, within: ServerCapacity) -> bool:
        """Whether `within` has this much."""
        if self.cores > within.cores:
            return False
        return within.memory is None or (self.memory or 0) <= within.memory

    def plus(self, other: ServerCapacity) -> ServerCapacity:
        return ServerCapacity(cores=self.cores + other.cores, memory=(self.memory or 0) + (other.memory or 0))

    def without(self, other: ServerCapacity) -> ServerCapacity:
        """What is left of it."""
        memory = None if self.memory is None else self.memory - (other.memory or 0)
        return ServerCapacity(cores=self.cores - other.cores, memory=memory)

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        return cores if self.memory is None else f"{cores} and {self.memory} bytes of memory"


@dataclass(frozen=True, kw_only=True)
class ServerRole:
    """The parameter servers of a job."""

    count: int
    cores: int = 1
    """Of each server: a server of c cores is c processes."""
    memory: int | None = None
    """Bytes that each server needs; None: not stated."""
    recovery: ServerRecovery = ServerRecovery.EXACT
    adjust_s: float = 60.0
    """The least seconds between two treatments of slow or overloaded servers; 0: none."""

    def __post_init__(self) -> None:
        if not 0 <= self.adjust_s < math.inf:
            raise UsageError(f"servers are treated every some seconds, or never (0); got {self.adjust_s}")
        if not 1 <= self.count <= MOST_SERVERS:
            raise UsageError(f"a server job has 1 to {MOST_SERVERS} servers, got {self.count}")
        if not 1 <= self.cores <= MOST_CORES:
            raise UsageError(f"a server has 1 to {MOST_CORES} cores, got {self.cores}")
        if self.recovery is ServerRecovery.REPLICA and self.count < 2:
            raise UsageError(
                "recovery by replica needs at least 2 servers, for a server's copy is on another one; got 1"
            )

    @property
    def needs(self) -> ServerCapacity:
        """Of all of them together."""
        return ServerCapacity(
            cores=self.count * self.cores, memory=None if self.memory is None else self.count * self.memory
        )

"""The settings of a job, and what a worker receives when it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import Placement


class ReductionOrder(StrEnum):
    """The order in which gradients of the virtual workers are added."""

    DDP = "ddp"
    TREE = "tree"


class GradientBackend(StrEnum):
    """The backend that transfers gradients."""

    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, kw_only=True)
class ReductionChoice:
    """How a job's gradients are added, and the reason."""

    order: ReductionOrder
    carrier: GradientBackend | None
    """None for a single worker, which transfers no gradients. Does not affect bits."""
    reason: str


class RecoveryMode(StrEnum):
    """How a job recovers from the loss of a worker."""

    PEERS = "peers"
    """The survivors continue, with the same bits: every worker keeps the contexts of all virtual workers."""
    APPROXIMATE = "approximate"
    """The survivors continue without the lost worker's gradients of this pass (EDL). Not exact."""
    CHECKPOINT = "checkpoint"
    """All workers restart from the newest checkpoint, with the same bits; workers keep no backups of each other."""


class Determinism(StrEnum):
    """How much may change without changing a bit (EasyScale's D0, D1, D2)."""

    STATIC = "static"
    ELASTIC = "elastic"
    HETEROGENEOUS = "heterogeneous"


@dataclass(frozen=True, kw_only=True)
class DevicePool:
    """The device types that a `heterogeneous` job may mix. All compute with the instruction set of the weakest."""

    types: tuple[str, ...]
    threads: int = 1
    """Threads of every worker, whatever number it was started with."""


@dataclass(frozen=True, kw_only=True)
class DeviceMix:
    """Whether a job may run on several device types at once: found by `gyrostat scan`, read by schedulers."""

    pool: tuple[str, ...]
    """The types that were scanned."""
    slowdown: float | None = None
    """The time of a step with the pins of the pool, relative to that without; measured on the scanning machine. None: not
    measured.
    """
    mixes_types: bool | None = None
    """True if the slowdown is acceptable. None: not measured, so one type at a time."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """Where and when a job writes checkpoints."""

    directory: str
    every: int = 0
    """Number of steps between checkpoints; 0: not by steps."""
    interval_s: float = 0.0
    """Seconds between checkpoints, or more if they are expensive; 0: not by time. Without both, on demand only."""
    keep: int = 3
    """Number of newest checkpoints that are kept."""
    resume: bool = True
    """Start from the newest valid checkpoint in `directory`, if one exists."""

    def __post_init__(self) -> None:
        if self.every < 0 or not 0 <= self.interval_s < math.inf:
            raise UsageError(
                "the interval between checkpoints must be 0 (never) or more, in steps and in seconds; got "
                f"{self.every} steps and {self.interval_s:g} seconds"
            )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Digests of all tracked state that `verify` requests of a run."""

    every: int
    """Number of steps between digests."""
    first: int = 0
    last: int | None = None
    """Only for steps first … last, counted from 1: the state after that many steps."""
    tensors: bool = False
    """Whether to add the digest of every single tensor."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a job trains: what decides its bits, and what each of its workers needs to know about that. The same in every
    description of a job, from `gyrostat run` and a cluster's `JobSpec` to the worker's `Assignment`."""

    virtual_workers_given: bool = True
    """False: the script may choose the number of virtual workers itself."""
    threads: int = 1
    """Threads of each worker; the number of a pool takes precedence."""
    reduction: ReductionOrder | None = None
    """None: the default of the worker's device; see `engine/transport/backend.py`."""
    determinism: Determinism = Determinism.ELASTIC
    pool: DevicePool | None = None
    """The device types of a `heterogeneous` job."""
    check_fingerprint: bool = True
    """False: workers and checkpoints of another fingerprint are accepted. For tests that must be able to fail."""
    batch_size: int | None = None
    """Overrides the batch size of loaders, for measuring (`profile-device`)."""
    reference: bool = False
    """Run as plain DDP with torch's own classes, one process per virtual worker: what `verify` compares with."""
    recovery: RecoveryMode = RecoveryMode.PEERS
    """What to do if a worker is lost. The reference cannot recover; see `recovers`."""
    timeout_s: float = 1800.0
    """The timeout of a collective."""
    checkpoint: CheckpointPolicy | None = None
    """None: the job writes no checkpoints."""
    stop_after: int | None = None
    """Checkpoint and stop after this many steps in total (`verify` uses it to split a run)."""
    probe: Probe | None = None

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UsageError(f"a worker needs at least one thread, got {self.threads}")
        if (self.pool is not None) != (self.determinism is Determinism.HETEROGENEOUS):
            raise UsageError(
                "a pool of device types and the level `heterogeneous` need each other: "
                "--determinism heterogeneous --pool avx512,avx2"
            )

    @property
    def recovers(self) -> bool:
        """Survivors can train on without a worker that dies."""
        return self.recovery is not RecoveryMode.CHECKPOINT and not self.reference


@dataclass(frozen=True, kw_only=True)
class NextGeneration:
    """A generation in preparation: its members, and how newcomers receive the job's state."""

    generation: int
    placement: Placement
    members: tuple[int, ...]
    """The member that is worker 0, 1, 2 … of the placement. Members are processes, numbered as they were started."""
    newcomers: tuple[int, ...]
    """The members that do not train yet."""
    donor: int
    """The member of the previous generation that sends the state to the newcomers."""
    store: str
    """Where its members rendezvous: path of a file, or tcp://HOST:PORT/NAME."""
    at_step: int | None = None
    """The boundary at which `--schedule` has it begin, and where all workers wait for it; None: as soon as possible."""
    is_recovery: bool = False
    """It begins at once, after the loss of a worker; the survivors agree on the placement."""
    waits: bool = False
    """After the loss of a worker: the survivors are too few, and wait at the next boundary for others."""

    def worker_of(self, member: int) -> int | None:
        """The member's worker number in the new placement; None if it leaves."""
        return self.members.index(member) if member in self.members else None


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """How a worker reaches the leader of a job with parameter servers."""

    address: tuple[str, int]
    token: bytes
    worker: str
    """The worker's name there. No process of the job ever had the same."""
    record: bool = False
    """The order of updates is recorded, for `gyrostat replay-async`."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a worker receives when it starts: its place in the job, and how the job trains."""

    placement: Placement
    options: TrainingOptions = TrainingOptions()
    worker: int = 0
    generation: int = 1
    store: str | None = None
    """Where the members of this generation rendezvous: path of a file, or tcp://HOST:PORT/NAME. Not needed by a single
    worker."""
    host: str = "127.0.0.1"
    """The address on which this worker listens for the others."""
    trace: str | None = None
    """A directory for this worker's part of the trace; None: no trace."""
    member: int = 0
    """This process's number in the job; unlike `worker` it never changes."""
    joins: bool = False
    """It joins a running job: it prepares, and begins at the boundary that the coordinator names. Until then `worker`,
    `generation` and `store` are not valid.
    """
    holds: tuple[int, ...] = ()
    """Steps at whose boundary all workers wait for the next generation, from `--schedule`."""
    paced: float | None = None
    """Samples per second of a paced device, which sleeps instead of computing; None: a real device."""
    servers: ServerAccess | None = None
    """Of a job with parameter servers, whose workers know nothing of one another: each is alone in its placement."""

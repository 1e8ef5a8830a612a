"""What a job is, and what one worker is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyrostat.core.placement import Placement


class ReductionOrder(StrEnum):
    """The order in which gradients of the virtual workers are added."""

    DDP = "ddp"
    TREE = "tree"


class GradientBackend(StrEnum):
    """What gradients travel over."""

    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, kw_only=True)
class ReductionChoice:
    """How a job's gradients are added, and why so."""

    order: ReductionOrder
    carrier: GradientBackend | None
    """None for a lone worker, whose gradients do not travel. Decides no bits."""
    reason: str


class RecoveryMode(StrEnum):
    """What becomes of a job that loses a worker."""

    PEERS = "peers"
    """Those that are left go on, with the same bits: every worker keeps the contexts of all virtual workers."""
    APPROXIMATE = "approximate"
    """Those that are left go on without what the lost one had computed in this pass (EDL). Not exact."""
    CHECKPOINT = "checkpoint"
    """All start again from the newest checkpoint, with the same bits; nothing is kept for each other."""


class Determinism(StrEnum):
    """How much may change without changing a bit (EasyScale's D0, D1, D2)."""

    STATIC = "static"
    ELASTIC = "elastic"
    HETEROGENEOUS = "heterogeneous"


@dataclass(frozen=True, kw_only=True)
class DevicePool:
    """The device types that a `heterogeneous` job may mix. All compute with what the weakest of them has."""

    types: tuple[str, ...]
    threads: int = 1
    """On every worker, whatever number it was started with."""


@dataclass(frozen=True, kw_only=True)
class DeviceMix:
    """Whether a job may run on devices of several types at once. What `gyrostat scan` found; a scheduler reads it."""

    pool: tuple[str, ...]
    """The types that were asked about."""
    slowdown: float | None = None
    """What a step takes when it computes with what they have in common, relative to what it takes without; measured on the
    machine that was scanned. None: never measured.
    """
    mixes_types: bool | None = None
    """True if that is cheap enough to be worth it. None: never measured, so one type at a time."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """Where and when a job checkpoints itself."""

    directory: str
    every: int = 0
    """Write one every so many steps; 0 means on demand only."""
    keep: int = 3
    """How many of the newest are kept."""
    resume: bool = True
    """Start from the newest valid checkpoint in `directory`, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What `verify` asks of a run: digests of all tracked state, taken after some steps."""

    every: int
    """After every so many steps."""
    first: int = 0
    last: int | None = None
    """Only for steps first … last (counted from 1: the state after that many steps)."""
    tensors: bool = False
    """Also the digest of every single tensor."""


@dataclass(frozen=True, kw_only=True)
class NextGeneration:
    """A generation that is being prepared: who belongs to it, and how the newcomers come to the job's state."""

    generation: int
    placement: Placement
    members: tuple[int, ...]
    """The member that is worker 0, 1, 2 … of the placement. Members are processes, numbered as they were started."""
    newcomers: tuple[int, ...]
    """Those of them that do not train yet."""
    donor: int
    """The member, of the generation before, that hands the state to the newcomers."""
    store: str
    """Where its members find one another: path of a file, or tcp://HOST:PORT/NAME."""
    is_rescue: bool = False
    """It begins at once, after a death, among those that are left, and they agree on the placement."""
    waits: bool = False
    """After a death: those that are left are too few, and wait at the next boundary for others."""

    def worker_of(self, member: int) -> int | None:
        """The number in the new placement; None for one that leaves."""
        return self.members.index(member) if member in self.members else None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """All that a worker is told when it starts: its place in the job and how the job runs."""

    placement: Placement
    worker: int = 0
    generation: int = 1
    store: str | None = None
    """Where the members of this generation find one another: path of a file, or tcp://HOST:PORT/NAME. Not needed by a lone
    worker."""
    host: str = "127.0.0.1"
    """Where this worker listens for the others."""
    virtual_workers_given: bool = True
    """False for a plain `python train.py`, where the script may choose N itself."""
    reduction: ReductionOrder | None = None
    """None: what suits the worker's device; `engine/transport/backend.py` says which."""
    determinism: Determinism = Determinism.ELASTIC
    threads: int = 1
    """What the worker was started with; a pool's number goes before it."""
    pool: DevicePool | None = None
    """Of a `heterogeneous` job."""
    check_fingerprint: bool = True
    """False: workers and checkpoints whose bits differ are let in. For tests that must be able to fail."""
    checkpoint: CheckpointPolicy | None = None
    reference: bool = False
    """Run as plain DDP with torch's own classes: the reference that `verify` compares with."""
    stop_after: int | None = None
    """Checkpoint and end after so many steps in all (used by `verify` to cut a run in two)."""
    probe: Probe | None = None
    trace: str | None = None
    """A directory for this worker's part of the trace, if one is wanted."""
    timeout_s: float = 1800.0
    """How long a collective may wait for a silent peer."""
    recovery: RecoveryMode = RecoveryMode.CHECKPOINT
    """What to do if another worker is lost."""
    member: int = 0
    """This process's number in the job; unlike `worker` it never changes."""
    joins: bool = False
    """It comes to a job that is running: it prepares, and begins at the boundary where it is told to. Until then `worker`,
    `generation` and `store` mean nothing.
    """
    holds: tuple[int, ...] = ()
    """Steps at whose boundary all workers wait for the next generation, as `--schedule` wants it."""
    paced: float | None = None
    """Samples per second of a paced device, which waits instead of computing; None: the device is real."""
    batch_size: int | None = None
    """What loaders take instead of what the script says: for measuring (`profile-device`)."""

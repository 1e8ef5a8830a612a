"""Requests to a running job, and its replies: typed messages in msgpack.

`control_socket` carries them between processes of one machine, `gyrostat.job.nodes.service` between machines; `client` is the
side that requests, `leader` the side that replies. A request that changes the job has an id: sent twice with the same id, it is
carried out once and answered twice (`replies`). It is answered when it is done, or at once with `retryable` if another
change is under way.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gyrostat.core.phase import JobPhase, ReconfigurationPhase
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.control.profiling import SizeMeasured
from gyrostat.job.control.shard_service import OpenShards, Pulled, PullShard

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Members = Annotated[tuple[int, ...], msgspec.Meta(max_length=10_000)]
"""Requests are part of the leader's record, so what a client sends is bounded."""


class Scale(msgspec.Struct, frozen=True, tag=True):
    """Run on `workers` workers."""

    request: RequestId
    workers: int


class ScaleRoles(msgspec.Struct, frozen=True, tag=True):
    """Run on this number of workers and of parameter servers. For a job with servers."""

    request: RequestId
    workers: int | None = None
    """None: as many as now."""
    servers: int | None = None
    relative: bool = False
    """The numbers are more (fewer, if negative) than now, not in all."""


class Migrate(msgspec.Struct, frozen=True, tag=True):
    """Replace these workers by new ones, in one switch."""

    request: RequestId
    members: Members


class ScaleBy(msgspec.Struct, frozen=True, tag=True):
    """Run on `by` workers more; fewer, if it is negative."""

    request: RequestId
    by: int
    members: Members = ()
    """The workers that leave; none: the last ones."""


class Occupy(msgspec.Struct, frozen=True, tag=True):
    """Run on exactly these devices, one worker on each; on none: suspend. Only for a job with a `DeviceAssignment`."""

    request: RequestId
    slots: Annotated[tuple[Slot, ...], msgspec.Meta(max_length=10_000)]


class Vacate(msgspec.Struct, frozen=True, tag=True):
    """End the workers on these devices now, without waiting for a boundary; the others recover. Idempotent; answered with
    `Status`."""

    devices: tuple[int, ...]


class ProfileJob(msgspec.Struct, frozen=True, tag=True):
    """Measure throughput on all sizes from `smallest` to `largest`, or on the size that the job has."""

    request: RequestId
    smallest: int | None = None
    largest: int | None = None
    steps: int = 20


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Answered with `Status`."""

    after_a_step: bool = False
    """Answer after the first step since the start, rather than at once."""


class AskCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Checkpoint at the next boundary."""


class AskStop(msgspec.Struct, frozen=True, tag=True):
    """Checkpoint and end at the next boundary."""


class RequestResult(msgspec.Struct, frozen=True, tag=True):
    """The result of a request."""

    done: bool
    text: str
    step: int = 0
    workers: int = 0
    pause_ms: float = 0.0
    prepare_ms: float = 0.0
    retryable: bool = False
    """Refused for now only: the same request may succeed later."""
    invalid: bool = False
    """Refused as bad input."""


class ProfileTable(msgspec.Struct, frozen=True, tag=True):
    """A job profile, from the smallest size to the largest."""

    rows: tuple[SizeMeasured, ...]


class ServerInfo(msgspec.Struct, frozen=True):
    """One parameter server of a job."""

    name: str
    cores: int
    slots: int
    """Of parameters, that it owns."""
    pids: tuple[int, ...] = ()
    busy: float | None = None
    """Share of time in which its cores worked, over the last seconds."""
    memory: int | None = None
    """Bytes of memory that its processes use."""


class Status(msgspec.Struct, frozen=True, tag=True):
    """The state of a job."""

    name: str
    program: str
    pid: int
    virtual_workers: int
    workers: int
    members: tuple[int, ...]
    generation: int
    phase: JobPhase
    reconfiguration: ReconfigurationPhase
    """How far a change of its workers is, while it trains."""
    step: int
    loss: float | None
    throughput: float | None
    """Samples per second, over the last few seconds."""
    leader: str = ""
    """The address of the leading agent, for a job on several nodes."""
    nodes: tuple[str, ...] = ()
    """The nodes whose agents are connected."""
    devices: tuple[int, ...] = ()
    """The device of each of `members`, if a scheduler assigns devices."""
    profiling: bool = False
    """It is measured on several numbers of workers, and returns to the one it had."""
    servers: tuple[ServerInfo, ...] | None = None
    """Its parameter servers; None: it has none, and is synchronous. `step` counts updates otherwise."""
    servers_settled: bool = True
    """No slot of parameters moves or is being saved, and each has its copy on another server, if it should."""

    @property
    def is_steady(self) -> bool:
        """It trains, and no change of its workers is under way."""
        steady = self.reconfiguration is ReconfigurationPhase.STEADY and not self.profiling
        return self.phase is JobPhase.TRAINING and steady


Request = (
    Scale
    | ScaleBy
    | ScaleRoles
    | Migrate
    | Occupy
    | Vacate
    | ProfileJob
    | AskStatus
    | AskCheckpoint
    | AskStop
    | OpenShards
    | PullShard
)
Reply = RequestResult | ProfileTable | Status | Pulled

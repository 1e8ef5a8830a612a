"""Messages that are not about rows: workers ↔ leader, servers ↔ leader. Typed values; at most one array of bytes follows.

A worker numbers its requests, and the leader repeats the number in its answer, which may come much later: a worker waits for a
shard, for a checkpoint, for others at an evaluation. The leader sends every worker each new map without being asked.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gyrostat.data.shards.messages import Shard
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.protocol.evaluation import EvaluationKey
from gyrostat.ps.protocol.messages import (
    AssumeTerm,
    CancelMove,
    DropSlot,
    ForgetEpochs,
    MirrorReady,
    MoveSlot,
    OwnSlots,
    SaveSlot,
    SetMirror,
    SlotArrived,
    SlotSaved,
    TermAssumed,
)
from gyrostat.ps.protocol.slot_map import SlotMap
from gyrostat.ps.store.spec import StoreSpec
from gyrostat.ps.wire.connection import PsConnection
from gyrostat.ps.wire.frames import FrameKind, MalformedFrame, PsFrame

_Text = Annotated[str, msgspec.Meta(max_length=10_000)]


# Worker → leader.


class AskProgress(msgspec.Struct, frozen=True, tag=True):
    """Answered before the job is open, too."""

    number: int


class OpenJob(msgspec.Struct, frozen=True, tag=True):
    number: int
    spec: StoreSpec
    data: DataSpec


class NextShard(msgspec.Struct, frozen=True, tag=True):
    number: int
    epoch: int


class ReportShard(msgspec.Struct, frozen=True, tag=True):
    number: int
    term: int
    lease: int
    samples: int


class RenewShards(msgspec.Struct, frozen=True, tag=True):
    """The worker makes progress: its shards stay with it. Not answered."""

    seconds: float = 0.0
    """Since the last such message."""
    waited: dict[str, tuple[float, int]] = {}
    """By server process: the seconds in which an exchange was under way there, and how many."""


class EvaluateNext(msgspec.Struct, frozen=True, tag=True):
    number: int
    key: EvaluationKey
    items: Annotated[int, msgspec.Meta(ge=0)]
    part_size: Annotated[int, msgspec.Meta(ge=1)]


class EvaluateReport(msgspec.Struct, frozen=True, tag=True):
    """The result follows as bytes."""

    number: int
    key: EvaluationKey
    start: int
    stop: int


class EvaluateResults(msgspec.Struct, frozen=True, tag=True):
    number: int
    key: EvaluationKey


class SaveJob(msgspec.Struct, frozen=True, tag=True):
    number: int


class AskDigest(msgspec.Struct, frozen=True, tag=True):
    number: int


class LogMetrics(msgspec.Struct, frozen=True, tag=True):
    """Not answered."""

    metrics: Annotated[dict[_Text, float], msgspec.Meta(max_length=10_000)]


class CloseWorker(msgspec.Struct, frozen=True, tag=True):
    """The script has finished."""

    number: int


FromWorker = (
    AskProgress
    | OpenJob
    | NextShard
    | ReportShard
    | RenewShards
    | EvaluateNext
    | EvaluateReport
    | EvaluateResults
    | SaveJob
    | AskDigest
    | LogMetrics
    | CloseWorker
)


# Leader → worker.


class JobProgress(msgspec.Struct, frozen=True):
    updates: int
    epoch: int
    committed: int = 0
    is_main: bool = True


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The request is carried out."""

    number: int
    progress: JobProgress
    shard: Shard | None = None
    epoch_over: bool = False
    part: tuple[int, int] | None = None
    """Of an evaluation; None: it is complete. Its results follow as bytes, of these lengths."""
    results: tuple[int, ...] = ()
    digest: str = ""


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    number: int
    reason: str
    term_over: bool = False
    """What the worker has computed since is void; otherwise it is a mistake in the script."""


class NewMap(msgspec.Struct, frozen=True, tag=True):
    map: SlotMap


FromLeader = Answered | RequestRefused | NewMap


# Server → leader, besides those of `protocol.messages`.


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """The process listens."""

    address: tuple[str, int]
    pid: int


class ServerLoad(msgspec.Struct, frozen=True, tag=True):
    """What a server has done since its start. Sent regularly, so it is also its heartbeat."""

    seconds: float = 0.0
    """Since the process began to serve."""
    busy: float = 0.0
    """Seconds in which it worked on requests."""
    cpu: float = 0.0
    """CPU time of the process: less than busy if it has to wait for a core."""
    requests: int = 0
    work: int = 0
    """Rows pulled and pushed: a measure of its load that does not depend on how fast it is."""
    rows: int = 0
    payload: int = 0
    memory: int = 0
    """Resident bytes."""
    slots: dict[int, float] = {}
    """By slot, its part of `busy`."""


class SlotNotSaved(msgspec.Struct, frozen=True, tag=True):
    """A slot cannot be written: the disk is full, for example."""

    checkpoint: int
    reason: str


class SlotDigest(msgspec.Struct, frozen=True, tag=True):
    number: int
    slot: int
    digest: str


class LinkLost(msgspec.Struct, frozen=True, tag=True):
    """The connection to another server has ended: a copy on its way there may be lost."""

    server: str


class ServerProblem(msgspec.Struct, frozen=True, tag=True):
    """Something that the server needs and cannot do, such as reading a checkpoint."""

    reason: str
    fatal: bool = True
    """Another server could not do it either; otherwise only this one ends."""


FromServerProcess = (
    TermAssumed
    | SlotArrived
    | MirrorReady
    | SlotSaved
    | SlotNotSaved
    | SlotDigest
    | ServerReady
    | ServerLoad
    | LinkLost
    | ServerProblem
)


# Leader → server.


class OpenStore(msgspec.Struct, frozen=True, tag=True):
    """What the job keeps on its servers. The first message."""

    spec: StoreSpec
    batches: int
    """Per epoch."""
    directory: str
    """For the files of slots."""


class ServerAddresses(msgspec.Struct, frozen=True, tag=True):
    """All servers: copies and updates go from one to another."""

    addresses: dict[str, tuple[str, int]]


class DigestSlot(msgspec.Struct, frozen=True, tag=True):
    """Answered with `SlotDigest`, by the slot's owner."""

    number: int
    slot: int
    committed: int


class EndServer(msgspec.Struct, frozen=True, tag=True):
    """The process ends."""


ToServerProcess = (
    AssumeTerm
    | MoveSlot
    | CancelMove
    | OwnSlots
    | DropSlot
    | SetMirror
    | SaveSlot
    | ForgetEpochs
    | OpenStore
    | ServerAddresses
    | DigestSlot
    | EndServer
)

_encode = msgspec.msgpack.Encoder().encode
from_worker = msgspec.msgpack.Decoder(FromWorker).decode
from_leader = msgspec.msgpack.Decoder(FromLeader).decode
from_server = msgspec.msgpack.Decoder(FromServerProcess).decode
to_server = msgspec.msgpack.Decoder(ToServerProcess).decode


def send_control(connection: PsConnection, message: msgspec.Struct, data: bytes = b"") -> None:
    connection.send(FrameKind.CONTROL, _encode(message), [memoryview(data)] if data else ())


def control_numbers(frame: PsFrame) -> memoryview:
    """The message of a control frame, for one of the decoders above."""
    if frame.kind is not FrameKind.CONTROL:
        raise MalformedFrame(f"a {frame.kind.name} frame where a control message is expected")
    return frame.numbers

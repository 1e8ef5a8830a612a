"""What launcher, fork parent and workers say to one another: typed messages, framed, over Unix sockets.

A frame is a length (4 bytes, big endian) and one message in msgpack. Every message is a tagged struct, so
that a reader knows what it got and refuses what it does not know; adding a message or a field with a default
keeps old readers alive, anything else raises VERSION, which both sides name in their first message. A frame
may carry open files beside it (SCM_RIGHTS): that is how a worker gets its pipes. No pickle, ever.

    agent ──Fork, ServeStore, Signal──▶ fork parent ──Forked, Exited, Children──▶ agent
    worker ──Rejoin, Steps, Logged, Probed, Checkpointed, NotCheckpointed, Finished, Failed, Ended──▶ agent
    worker ──Ready, Prepared, Switched, Leaving──▶ agent ──Prepare, SetFence, Cancel, Terminate──▶ worker

`forkparent` and `start` are the two ends of the first line; `messenger` and `crew` those of the others. What is an agent on
several machines is `launcher` on one.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from gyrostat.core.errors import GyrostatError
from gyrostat.core.job import Assignment, NextGeneration, ReductionChoice
from gyrostat.core.placement import Placement

VERSION = 2
MAX_FRAME = 16 << 20
_HEADER = 4
_MAX_FDS = 16

Message = TypeVar("Message", bound=msgspec.Struct)


class ProtocolError(GyrostatError):
    """Bytes on a socket that are no message of ours."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker runs: a script, or with `module` the module of that name, as `python [-m] name args…`
    would.
    """

    name: str
    module: bool = False
    args: tuple[str, ...] = ()


class WorkerId(msgspec.Struct, frozen=True, array_like=True):
    """A worker process among all that a job has ever had."""

    attempt: int
    """How often the job was started again before it."""
    member: int
    """Its number since then."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a new worker needs to know."""

    assignment: Assignment
    program: Program
    cwd: str
    env: dict[str, str]
    worker_id: WorkerId = WorkerId(0, 0)
    agent: str | None = None
    """Path of the socket at which the agent's successor is found, if it goes away; None: the worker ends with it."""
    agent_timeout_s: float = float("inf")
    """How long the agent may be away before the worker counts as orphaned."""
    box: str | None = None
    """Path of the file in which the worker notes what it runs (`blackbox`)."""
    shows_stacks: bool = False
    """It answers a signal with the stacks of its threads, in a file beside that (`stacks`)."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message in either direction."""

    version: int
    pid: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. Three files come with it: its stdout, its stderr, and its end of the socket to the
    launcher.
    """

    spec: WorkerSpec


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker, or nothing if it has gone."""

    pid: int
    number: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A worker has gone, and whatever it left running in its process group with it."""

    pid: int
    code: int
    """Its exit code, or the negated number of the signal that killed it."""


class Children(msgspec.Struct, frozen=True, tag=True):
    """All workers that a fork parent has forked, for an agent that comes after another."""

    living: dict[int, WorkerId]
    """By process id."""
    exited: list[tuple[WorkerId, int]]


class ServeStore(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that serves a rendezvous. Two files come with it: the socket it listens on, and one to the agent, by whose
    closing it is ended."""


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """The first word, after Hello, of a worker that has lost its agent to the next one. What it said of lasting meaning
    follows once more."""

    worker_id: WorkerId


class Started(msgspec.Struct, frozen=True, tag=True):
    step: int
    resumed_from: str | None
    refused: list[str]
    at: float
    """Seconds of the machine's monotonic clock, as everywhere below."""
    virtual_workers: int | None = None
    """Their number, which the script may have chosen."""
    reduction: ReductionChoice | None = None
    alike: dict[str, str] = {}
    """What must be equal on every worker that joins."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    step: int
    epoch: int
    loss: float | None
    samples: int
    at: float
    busy: tuple[float, ...] = ()
    """Seconds for which worker 0, 1, 2 … ran its virtual workers, before it waited for others."""


class StepReports(msgspec.Struct, frozen=True, tag=True):
    """Some finished steps; several in one message when they are short."""

    steps: list[StepReport]


class Logged(msgspec.Struct, frozen=True, tag=True):
    step: int
    metrics: dict[str, float]


class Probed(msgspec.Struct, frozen=True, tag=True):
    step: int
    digest: str
    tensors: dict[str, str]


class Checkpointed(msgspec.Struct, frozen=True, tag=True):
    step: int
    path: str
    seconds: float
    """Until it was in place."""
    blocked: float
    """For which training stood still."""


class NotCheckpointed(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint could not be written; the worker trains on."""

    reason: str


class WorkerFinished(msgspec.Struct, frozen=True, tag=True):
    step: int
    digest: str
    at: float


class FailureKind(StrEnum):
    """Whose fault a failure is: that decides what the user is shown, and the exit code."""

    SCRIPT = "script"
    USAGE = "usage"
    PEER_LOST = "peer lost"
    """Another worker's: only its consequence was seen here."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The script raised."""

    kind: FailureKind
    summary: str
    traceback: str


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """The last word of a worker that leaves in good order."""

    stopped: bool
    """It left early, at a boundary, because some worker was asked to stop, or no worker had an agent."""
    left: bool = False
    """It left a job that goes on without it."""
    asked_by: int | None = None
    """The signal by which this worker was asked to stop the job, by the leader or directly."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A newcomer has built everything and waits to join."""

    alike: dict[str, str]


class GenerationPrepared(msgspec.Struct, frozen=True, tag=True):
    """Connected to the members of a generation to come."""

    generation: int


class Switched(msgspec.Struct, frozen=True, tag=True):
    """A generation has begun, on this worker."""

    generation: int
    step: int
    workers: int
    paused: float
    """Seconds for which this worker stood still; on a newcomer, for which the others would have to wait for it."""
    why_all: str | None = None
    """Why a newcomer could not follow the others, and was told all state at the fence."""


class WorkerLeaving(msgspec.Struct, frozen=True, tag=True):
    """This worker was sent SIGTERM: it wants to leave at the next boundary that can be."""


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """What each thread of the worker is doing. Its agent says that for it: the worker itself may be stuck."""

    text: str


class PeerLossReported(msgspec.Struct, frozen=True, tag=True):
    """This worker has lost another one of its generation, and waits to be told who is left."""

    generation: int
    why: str


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """This worker has found those that are left."""

    generation: int
    placement: Placement
    """Which they have agreed on."""
    again: int
    """Micro-batches that it runs because the one that had run them is lost."""
    paused: float
    """Seconds for which it stood still."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Are you there?"""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The process runs. What its script does, another thread does."""


class BeginRecovery(msgspec.Struct, frozen=True, tag=True):
    """Somebody is lost: the members of this generation go on, at once and in the middle of whatever they are doing."""

    plan: NextGeneration


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Connect to the members of a generation to come, while training goes on."""

    plan: NextGeneration


class SetFence(msgspec.Struct, frozen=True, tag=True):
    """All are connected: the generation begins at the boundary of step `not_before`, or the next that all agree on."""

    generation: int
    not_before: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The generation will not be."""

    generation: int


class Terminate(msgspec.Struct, frozen=True, tag=True):
    """The job is to end: do as a program does that is sent SIGTERM, or checkpoint at the next boundary and stop.

    The signal itself, to a single worker, means that this one is to leave.
    """

    final: bool = False
    """The job has failed, or is complete: nobody comes to the rescue of who has lost another."""


ToForkParent = Hello | Fork | Signal | ServeStore
FromForkParent = Hello | Forked | Exited | Children
ToWorker = Hello | Prepare | SetFence | Cancel | BeginRecovery | Ping | Terminate
FromWorker = (
    Hello
    | Rejoin
    | Started
    | StepReports
    | Logged
    | Probed
    | Checkpointed
    | NotCheckpointed
    | WorkerFinished
    | Failed
    | WorkerEnded
    | Ready
    | GenerationPrepared
    | Switched
    | WorkerLeaving
    | Stacks
    | PeerLossReported
    | Recovered
    | Pong
)

LASTING = (
    Started,
    Ready,
    GenerationPrepared,
    Switched,
    PeerLossReported,
    Recovered,
    WorkerLeaving,
    WorkerFinished,
    Failed,
    WorkerEnded,
)
"""What a worker says that counts also for those who have not been there when it was said."""

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over the wire."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME}"
        )
    return len(body).to_bytes(_HEADER, "big") + body


class Frames(Generic[Message]):
    """Puts messages together again from the pieces in which a socket delivers them."""

    def __init__(self, expected: object) -> None:
        """`expected` is the union of message types that may come."""
        self._decoder = msgspec.msgpack.Decoder(type=expected)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes. What it leaves over waits for more."""
        self._pending += data
        while len(self._pending) >= _HEADER:
            size = int.from_bytes(self._pending[:_HEADER], "big")
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame announces {size} bytes, over the limit of {MAX_FRAME}")
            if len(self._pending) < _HEADER + size:
                return
            body = bytes(self._pending[_HEADER : _HEADER + size])
            del self._pending[: _HEADER + size]
            try:
                yield self._decoder.decode(body)
            except (msgspec.DecodeError, GyrostatError) as error:
                raise ProtocolError(f"a frame of {size} bytes is no message known here: {error}") from error


class Channel(Generic[Message]):
    """One end of a socket on which messages travel, with the files that came beside them."""

    def __init__(self, sock: socket.socket, expected: object) -> None:
        self._socket = sock
        self._frames: Frames[Message] = Frames(expected)
        self.files: list[int] = []
        """Received and not yet taken; whoever takes them closes them."""
        self.closed = False
        """The other end has closed, and everything it sent has been read."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, files: Sequence[int] = ()) -> None:
        """Send one message; blocks while the other end does not read."""
        data = frame(message)
        sent = socket.send_fds(self._socket, [data], list(files)) if files else 0
        self._socket.sendall(data[sent:])

    def receive(self, *, wait: bool = True) -> list[Message] | None:
        """What one read brings, maybe nothing complete; None when the other end has closed."""
        how = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:  # not socket.recv_fds, which forgets its flags
            data, beside, flags, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_MAX_FDS * 4), how)
        except ConnectionResetError:
            return None
        for level, kind, files in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.files += array.array("i", files[: len(files) - len(files) % 4])
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"more than {_MAX_FDS} files came with one message")
        return list(self._frames.feed(data)) if data else None

    def drain(self) -> Iterator[Message]:
        """All that has been sent so far. Afterwards `closed` says whether more can come."""
        with contextlib.suppress(BlockingIOError):
            while (messages := self.receive(wait=False)) is not None:
                yield from messages
            self.closed = True

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files.clear()
        self._socket.close()


def greet(channel: Channel[Message]) -> None:
    """Send our version."""
    channel.send(Hello(VERSION, os.getpid()))


def check_greeting(message: object) -> Hello:
    """The other end's first message must be a Hello of our version."""
    if not isinstance(message, Hello):
        raise ProtocolError(f"expected a Hello first, got {type(message).__name__}")
    if message.version != VERSION:
        raise ProtocolError(
            f"the other end speaks version {message.version} of the protocol, this one {VERSION}"
        )
    return message

"""Messages between agents and clients over the network: typed, in msgpack, carried by `service`.

    agent ──NodeAttending, WorkerSaid, WorkerGone, ForwardedRequest, NodeLeaving──▶ leader
    leader ──NodeWelcome, StartWorker, TellWorker, SignalWorker, ForwardedReply, NodeDismissed, JobOver──▶ agent
    client ──requests.Request──▶ any agent ──requests.Reply──▶ client

Every message is a tagged struct; unknown ones are refused. Adding a message, or a field with a default, is compatible; any
other change needs another version of the service, which is part of its name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gyrostat.core.errors import GyrostatError
from gyrostat.core.evidence import Evidence
from gyrostat.core.job import Assignment
from gyrostat.job.control.control_socket import NAMES
from gyrostat.job.control.requests import Reply, Request
from gyrostat.job.processes.channel import ProtocolError
from gyrostat.job.processes.protocol import (
    LASTING,
    FromWorker,
    Program,
    Started,
    StepReports,
    ToWorker,
    WorkerFinished,
    WorkerId,
)

SERVICE = "gyrostat.job.v1.Job"
LARGEST = 4 << 20
"""Bytes of one message."""


class WorkerFacts(msgspec.Struct, frozen=True):
    """The state of one worker, as its agent knows it."""

    worker_id: WorkerId
    said: list[FromWorker]
    """The last message of each lasting kind, in order."""
    code: int | None = None
    """The exit code; None: it runs."""
    evidence: Evidence | None = None


class NodeAttending(msgspec.Struct, frozen=True, tag=True):
    """The first message of an agent to a leader."""

    node: Annotated[str, msgspec.Meta(pattern=f"^{NAMES.pattern}$")]
    run: Annotated[str, msgspec.Meta(max_length=64)] | None
    """The run of the job to which its workers belong, if it knows."""
    workers: list[WorkerFacts]
    clock: float = 0.0
    """The node's monotonic clock, which starts at another moment on each machine."""


class WorkerSaid(msgspec.Struct, frozen=True, tag=True):
    worker_id: WorkerId
    message: FromWorker


class WorkerGone(msgspec.Struct, frozen=True, tag=True):
    worker_id: WorkerId
    code: int
    evidence: Evidence | None = None


class ForwardedRequest(msgspec.Struct, frozen=True, tag=True):
    """A client of this agent sends a request."""

    number: int
    request: Request


class NodeLeaving(msgspec.Struct, frozen=True, tag=True):
    """This node leaves the job."""


class NodeWelcome(msgspec.Struct, frozen=True, tag=True):
    run: str


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    worker_id: WorkerId
    assignment: Assignment
    program: Program


class TellWorker(msgspec.Struct, frozen=True, tag=True):
    worker_id: WorkerId
    message: ToWorker


class SignalWorker(msgspec.Struct, frozen=True, tag=True):
    worker_id: WorkerId
    number: int


class ForwardedReply(msgspec.Struct, frozen=True, tag=True):
    number: int
    reply: Reply


class NodeDismissed(msgspec.Struct, frozen=True, tag=True):
    """The node has no workers any more: its agent ends."""


class JobOver(msgspec.Struct, frozen=True, tag=True):
    code: int
    """The exit code of every agent's command."""
    text: str


Report = NodeAttending | WorkerSaid | WorkerGone | ForwardedRequest | NodeLeaving
Instruct = NodeWelcome | StartWorker | TellWorker | SignalWorker | ForwardedReply | NodeDismissed | JobOver

encode = msgspec.msgpack.Encoder().encode
_reports: msgspec.msgpack.Decoder[list[Report]] = msgspec.msgpack.Decoder(list[Report])
_instructs: msgspec.msgpack.Decoder[list[Instruct]] = msgspec.msgpack.Decoder(list[Instruct])
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_reports(data: bytes) -> list[Report]:
    """One or more reports."""
    try:
        return _reports.decode(data)
    except (msgspec.DecodeError, GyrostatError) as error:
        raise _no_message("report", error) from error


def decode_instructs(data: bytes) -> list[Instruct]:
    """One or more reports."""
    try:
        return _instructs.decode(data)
    except (msgspec.DecodeError, GyrostatError) as error:
        raise _no_message("instruction", error) from error


def decode_request(data: bytes) -> Request:
    try:
        return _requests.decode(data)
    except (msgspec.DecodeError, GyrostatError) as error:
        raise _no_message("request", error) from error


def decode_reply(data: bytes) -> Reply:
    try:
        return _replies.decode(data)
    except (msgspec.DecodeError, GyrostatError) as error:
        raise _no_message("reply", error) from error


def _no_message(kind: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"not a known {kind} of {SERVICE}: {error}")


def on_another_clock(message: FromWorker, behind: float) -> FromWorker:
    """The same message, with its times on a clock to which the worker's is `behind` seconds behind."""
    match message:
        case StepReports(steps=steps):
            return StepReports([msgspec.structs.replace(step, at=step.at + behind) for step in steps])
        case Started() | WorkerFinished():
            return msgspec.structs.replace(message, at=message.at + behind)
    return message


class WorkerFactsTable:
    """The state of workers: an agent's own, or, in a leader, all."""

    def __init__(self) -> None:
        self._said: dict[WorkerId, dict[type, FromWorker]] = {}
        self._codes: dict[WorkerId, int] = {}
        self._evidence: dict[WorkerId, Evidence | None] = {}

    def started(self, worker_id: WorkerId) -> None:
        self._said.setdefault(worker_id, {})

    def is_news(self, worker_id: WorkerId, message: FromWorker) -> bool:
        """Record a message. False if it repeats the last one of its kind."""
        if not isinstance(message, LASTING):
            return True
        said = self._said.setdefault(worker_id, {})
        if said.get(type(message)) == message:
            return False
        said.pop(type(message), None)
        said[type(message)] = message
        return True

    def has_gone(self, worker_id: WorkerId, code: int, evidence: Evidence | None = None) -> bool:
        """Record an exit. False if it was known."""
        self._said.setdefault(worker_id, {})
        if worker_id in self._codes:
            return False
        self._codes[worker_id], self._evidence[worker_id] = code, evidence
        return True

    def all(self) -> list[WorkerFacts]:
        return [
            WorkerFacts(
                worker_id, list(said.values()), self._codes.get(worker_id), self._evidence.get(worker_id)
            )
            for worker_id, said in self._said.items()
        ]

    def forget_before(self, attempt: int) -> None:
        """Drop workers of earlier attempts."""
        for worker_id in [worker_id for worker_id in self._said if worker_id.attempt < attempt]:
            self._said.pop(worker_id)
            self._codes.pop(worker_id, None)
            self._evidence.pop(worker_id, None)

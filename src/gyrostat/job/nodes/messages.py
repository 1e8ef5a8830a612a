"""What agents and clients say to one another over the network: typed messages in msgpack, carried by `service`.

    agent ──Attending, Said, Gone, Asking, Leaving──▶ leader ──Welcome, StartWorker, TellWorker, SignalWorker, Answered,
                                                                Dismissed, JobOver──▶ agent
    client ──door.Request──▶ any agent ──door.Reply──▶ client

Every message is a tagged struct, so that a reader knows what it got and refuses what it does not know. Adding a message or a
field with a default keeps old readers alive; anything else makes another version of the service, which its name bears.
"""

from __future__ import annotations

import msgspec

from gyrostat.core.errors import GyrostatError
from gyrostat.core.evidence import Evidence
from gyrostat.core.job import Assignment
from gyrostat.job.control.requests import Reply, Request
from gyrostat.job.processes.protocol import (
    LASTING,
    FromWorker,
    Program,
    ProtocolError,
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
    """What an agent knows of one of its workers."""

    worker_id: WorkerId
    said: list[FromWorker]
    """Of lasting meaning; the last of each kind, in order."""
    code: int | None = None
    """How it has exited; None: it lives."""
    evidence: Evidence | None = None


class NodeAttending(msgspec.Struct, frozen=True, tag=True):
    """The first word of an agent to a leader."""

    node: str
    run: str | None
    """Which run of the job it belongs to, if it has been told."""
    workers: list[WorkerFacts]
    clock: float = 0.0
    """Of the node, now: machines count their time from different moments."""


class WorkerSaid(msgspec.Struct, frozen=True, tag=True):
    worker_id: WorkerId
    message: FromWorker


class WorkerGone(msgspec.Struct, frozen=True, tag=True):
    worker_id: WorkerId
    code: int
    evidence: Evidence | None = None


class ForwardedRequest(msgspec.Struct, frozen=True, tag=True):
    """Somebody at this agent's door wants something of the job."""

    number: int
    request: Request


class NodeLeaving(msgspec.Struct, frozen=True, tag=True):
    """This node is to be freed."""


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
    """The node is free: its agent may go."""


class JobOver(msgspec.Struct, frozen=True, tag=True):
    code: int
    """What every agent's command returns."""
    text: str


Report = NodeAttending | WorkerSaid | WorkerGone | ForwardedRequest | NodeLeaving
Instruct = NodeWelcome | StartWorker | TellWorker | SignalWorker | ForwardedReply | NodeDismissed | JobOver

encode = msgspec.msgpack.Encoder().encode
_reports: msgspec.msgpack.Decoder[list[Report]] = msgspec.msgpack.Decoder(list[Report])
_instructs: msgspec.msgpack.Decoder[list[Instruct]] = msgspec.msgpack.Decoder(list[Instruct])
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_reports(data: bytes) -> list[Report]:
    """Those that were waiting to be sent travel together."""
    try:
        return _reports.decode(data)
    except (msgspec.DecodeError, GyrostatError) as error:
        raise _no_message("report", error) from error


def decode_instructs(data: bytes) -> list[Instruct]:
    """Those that were waiting to be sent travel together."""
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
    return ProtocolError(f"no {kind} of {SERVICE} that is known here: {error}")


def on_another_clock(message: FromWorker, behind: float) -> FromWorker:
    """The same, with its times on a clock to which the worker's is so many seconds behind."""
    match message:
        case StepReports(steps=steps):
            return StepReports([msgspec.structs.replace(step, at=step.at + behind) for step in steps])
        case Started() | WorkerFinished():
            return msgspec.structs.replace(message, at=message.at + behind)
    return message


class WorkerFactsTable:
    """What is known of workers: of an agent's own, or, in a leader, of all."""

    def __init__(self) -> None:
        self._said: dict[WorkerId, dict[type, FromWorker]] = {}
        self._codes: dict[WorkerId, int] = {}
        self._evidence: dict[WorkerId, Evidence | None] = {}

    def started(self, worker_id: WorkerId) -> None:
        self._said.setdefault(worker_id, {})

    def is_news(self, worker_id: WorkerId, message: FromWorker) -> bool:
        """Takes it in. False if it is only said once more."""
        if not isinstance(message, LASTING):
            return True
        said = self._said.setdefault(worker_id, {})
        if said.get(type(message)) == message:
            return False
        said.pop(type(message), None)
        said[type(message)] = message
        return True

    def has_gone(self, worker_id: WorkerId, code: int, evidence: Evidence | None = None) -> bool:
        """Takes it in. False if it was known."""
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
        """Earlier starts of the job do not matter any more."""
        for worker_id in [worker_id for worker_id in self._said if worker_id.attempt < attempt]:
            self._said.pop(worker_id)
            self._codes.pop(worker_id, None)
            self._evidence.pop(worker_id, None)

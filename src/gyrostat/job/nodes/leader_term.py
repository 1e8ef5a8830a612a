"""One agent's term as leader of a job on several nodes, from winning the lease to losing it.

A `LeaderTerm` connects the job's `leader`, the `node_registry` that carries its decisions out, and the lease store, in which
the record for the next leader is kept under this term's token before it is acted on. All nodes are equal, its own included:
their agents report to `take`, and receive instructions. It lives in the event loop of `agent`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from gyrostat.core.errors import LeaseError, UsageError, ValueTooLarge
from gyrostat.job.control.executor import LeaderRecord, RecordRefused
from gyrostat.job.control.leader import Leader
from gyrostat.job.control.observer import Observer
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.requests import Reply, Status
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.nodes.lease import LeaseStore
from gyrostat.job.nodes.messages import (
    ForwardedReply,
    ForwardedRequest,
    JobOver,
    NodeAttending,
    NodeDismissed,
    NodeLeaving,
    NodeWelcome,
    Report,
    WorkerFacts,
    WorkerFactsTable,
    WorkerGone,
    WorkerSaid,
    on_another_clock,
)
from gyrostat.job.nodes.node_registry import NodeRegistry, Send
from gyrostat.job.nodes.service import NodeSession
from gyrostat.job.processes.protocol import WorkerId

_RECORD = "record"
LOOK_AT_LEAVERS_S = 0.1
STORE_LOST = "the lease store has lost its data"


class JobOutcome(msgspec.Struct, frozen=True):
    """The result of the job, which every agent's command returns."""

    code: int
    text: str


class TermRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The value in the lease store."""

    run: str
    """The id of the run: a job's name may be used again."""
    record: LeaderRecord | None = None
    nodes: tuple[str, ...] | None = None
    """Those on which the job's workers may be."""
    over: JobOutcome | None = None


def read_kept(store: LeaseStore) -> TermRecord | None:
    data = store.get(_RECORD)
    try:
        return None if data is None else msgspec.msgpack.decode(data, type=TermRecord)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"what the lease store holds for this job was written by another version ({error}); use another --name"
        ) from error


@dataclass(frozen=True, kw_only=True)
class LeaseGrant:
    """The lease under which this agent leads, and its addresses."""

    store: LeaseStore
    token: int
    run: str
    address: str
    """Of the agent's service."""
    rendezvous: str
    """The address at which workers of a generation connect."""


class LeaderTerm:
    def __init__(
        self, request: RunRequest, observer: Observer, grant: LeaseGrant, *, nodes: int, node_timeout: float
    ) -> None:
        """The job starts when `nodes` agents are connected; one may be away for `node_timeout` seconds."""
        self.grant, self._nodes = grant, nodes
        self.registry = NodeRegistry(
            request.program,
            store=lambda attempt: f"{grant.rendezvous}/{grant.run}-{attempt}",
            keep=self._keep,
            node_timeout=node_timeout,
        )
        self.leader, self._observer = Leader(request, self.registry, observer), observer
        self._reported = False
        self._facts = WorkerFactsTable()
        self._sessions: dict[str, NodeSession] = {}
        self._behind: dict[str, float] = {}
        """Seconds by which a node's monotonic clock is behind this one."""
        self._stopping = False

    def begin(self, node: str, send: Send, workers: list[WorkerFacts], kept: TermRecord | None) -> None:
        """With this agent's own node, and what the previous leader kept if there was one."""
        self.registry.came(node, send, _living(workers), time.monotonic())
        if kept is not None and kept.record is not None:
            self.registry.expect(_worker_ids(kept.record), kept.nodes, time.monotonic())
            self.leader.take_over(kept.record)
        self._hear(node, workers)

    # Nodes.

    def came(self, session: NodeSession) -> None:
        """An agent connects, for the first time or again."""
        name, attending = session.node, session.attending
        if name in self._sessions:
            self._sessions[name].close()
        self._sessions[name] = session
        self._behind[name] = time.monotonic() - attending.clock
        session.send(NodeWelcome(self.grant.run))
        workers = self._workers_of(attending)
        lost = self.registry.came(name, session.send, _living(workers), time.monotonic())
        self._hear(name, workers)
        for worker_id in _living(workers):
            self.leader.back(worker_id)
        for worker_id in set(lost) - {facts.worker_id for facts in workers}:
            self.registry.gone(worker_id)
            self.leader.lost(worker_id, f"its agent, {name}, has come back without it")

    def _workers_of(self, attending: NodeAttending) -> list[WorkerFacts]:
        """Workers of another run of the job do not count: their agent ends them."""
        return attending.workers if attending.run == self.grant.run else []

    def reported(self, session: NodeSession, reports: list[Report]) -> None:
        if self._sessions.get(session.node) is session:
            for report in reports:
                self.take(session.node, report)

    def went(self, session: NodeSession) -> None:
        if self._sessions.get(session.node) is session:
            del self._sessions[session.node]
            self.registry.went(session.node, session.send, time.monotonic())

    def take(self, name: str, report: Report) -> None:
        """A report of a node's agent."""
        match report:
            case WorkerSaid(worker_id=worker_id, message=message):
                if self._facts.is_news(worker_id, message):
                    self.leader.heard(worker_id, on_another_clock(message, self._behind.get(name, 0.0)))
            case WorkerGone(worker_id=worker_id, code=code, evidence=evidence):
                self.registry.gone(worker_id)
                if self._facts.has_gone(worker_id, code, evidence):
                    self.leader.exited(worker_id, code, evidence)
            case ForwardedRequest(number=number, request=request):
                self.leader.asked(request, _RemoteRequester(partial(self._send_reply, name, number)))
            case NodeLeaving():
                self.registry.nodes[name].leaving = True

    def _hear(self, name: str, workers: list[WorkerFacts]) -> None:
        for facts in workers:
            for message in facts.said:
                self.take(name, WorkerSaid(facts.worker_id, message))
            if facts.code is not None:
                self.take(name, WorkerGone(facts.worker_id, facts.code, facts.evidence))

    def _send_reply(self, name: str, number: int, reply: Reply) -> None:
        """To the agent that received the request. If it is away, it sends the request again."""
        if isinstance(reply, Status):
            nodes = tuple(sorted(self.registry.present()))
            reply = msgspec.structs.replace(reply, leader=self.grant.address, nodes=nodes)
        node = self.registry.nodes.get(name)
        if node is not None and node.send is not None:
            node.send(ForwardedReply(number, reply))

    # Time.

    def tick(self) -> None:
        """Start the job when enough nodes are connected, give up workers out of reach, let the leader decide, let nodes
        leave."""
        if not self.leader.has_begun and len(self.registry.present()) >= self._nodes:
            self.leader.begin()
        lost = self.registry.overdue(time.monotonic())
        if self.leader.stopped_by_workers:
            lost = [
                (worker_id, "its agent was away, and it has left")
                for worker_id in self.registry.out_of_reach()
            ]
        for worker_id, why in lost:
            self.registry.gone(worker_id)
            self.leader.lost(worker_id, why)
        self.leader.tick()
        self._free_nodes()

    def deadline(self) -> float | None:
        leaving = any(node.leaving for node in self.registry.nodes.values())
        look = time.monotonic() + LOOK_AT_LEAVERS_S if leaving else None
        deadlines = (self.leader.deadline(), self.registry.deadline(), look)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _free_nodes(self) -> None:
        """Workers of leaving nodes leave at a fence, then their agents end. If all nodes leave, the job stops."""
        present = self.registry.present()
        leavers = [name for name in present if self.registry.nodes[name].leaving]
        if not leavers:
            return
        if len(leavers) == len(present):
            if not self._stopping:
                self._stopping = True
                self.leader.signalled(signal.SIGTERM)
            return
        worker_ids = [worker_id for name in leavers for worker_id in self.registry.workers_of(name)]
        if worker_ids:
            self.leader.free([worker_id.member for worker_id in worker_ids])
        for name in leavers:
            send = self.registry.nodes[name].send
            if send is not None and not self.registry.workers_of(name):
                send(NodeDismissed())

    # The end.

    def conclude(self, outcome: Outcome) -> JobOutcome | None:
        """Show the result on this node, keep it, and send it to all other nodes. None: not possible now."""
        if (
            not self._reported
        ):  # before others know of it: if this agent is killed meanwhile, the next leader shows it
            self._reported = True
            self._observer.over(outcome)
        text = f"digest {outcome.digest}" if outcome.digest is not None else "the job has ended"
        if outcome.failure is not None:
            text = f"the job has failed: {outcome.failure}"
        over = JobOutcome(outcome.exit_code, text)
        if not self._put(TermRecord(run=self.grant.run, over=over)):
            return None
        self.leader.close()
        for session in self._sessions.values():
            session.send(JobOver(over.code, over.text))
        return over

    def close(self) -> None:
        """After what has been sent."""
        for session in self._sessions.values():
            session.close()

    def _keep(self, record: Callable[[], LeaderRecord]) -> bool:
        nodes = tuple(self.registry.may_have_workers())
        return self._put(TermRecord(run=self.grant.run, record=record(), nodes=nodes))

    def _put(self, kept: TermRecord) -> bool:
        try:
            self.grant.store.put(_RECORD, msgspec.msgpack.encode(kept), self.grant.token)
        except ValueTooLarge as error:
            raise RecordRefused(f"the record for the next leader cannot be kept: {error}") from error
        except LeaseError:
            return False  # tried again; if the lease is lost, the campaign reports it
        return True


def _living(workers: list[WorkerFacts]) -> list[WorkerId]:
    return [facts.worker_id for facts in workers if facts.code is None]


def _worker_ids(record: LeaderRecord) -> list[WorkerId]:
    """The workers that the job has, on some node."""
    if record.coordinator is None:
        return []
    members = {*record.coordinator.members, *record.coordinator.newcomers}
    return [WorkerId(record.attempt, member) for member in sorted(members)]


@dataclass(frozen=True)
class _RemoteRequester:
    """A client of another agent."""

    send: Callable[[Reply], None]

    def answer(self, reply: Reply) -> None:
        self.send(reply)

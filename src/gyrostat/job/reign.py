"""An agent's time as leader of a job on several nodes, from winning the lease to losing it.

A `Reign` brings together the job's `leader`, the `company` of nodes that carries its decisions out, and the lease store, in
which what the next leader needs is kept under this one's token before it is acted on. All nodes are alike to it, its own
included: their agents report to `take`, and are sent instructions. It lives in the loop of `agent`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from gyrostat.core.errors import LeaseError, UsageError
from gyrostat.job.company import Company, Send
from gyrostat.job.conversation import (
    Answered,
    Asking,
    Attending,
    Dismissed,
    Facts,
    Gone,
    JobOver,
    Leaving,
    Report,
    Said,
    Welcome,
    WorkerFacts,
    on_another_clock,
)
from gyrostat.job.door import Reply, Status
from gyrostat.job.leader import Leader, Record
from gyrostat.job.lease import LeaseStore
from gyrostat.job.observer import Observer
from gyrostat.job.outcome import Outcome
from gyrostat.job.protocol import Seat
from gyrostat.job.request import RunRequest
from gyrostat.job.service import Session

_RECORD = "record"
LOOK_AT_LEAVERS_S = 0.1


class Over(msgspec.Struct, frozen=True):
    """How the job has ended, for every agent's command."""

    code: int
    text: str


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in the lease store."""

    run: str
    """Which run of the job: the same name may be used again."""
    record: Record | None = None
    over: Over | None = None


def read_kept(store: LeaseStore) -> Kept | None:
    data = store.get(_RECORD)
    try:
        return None if data is None else msgspec.msgpack.decode(data, type=Kept)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"what the lease store holds for this job was written by another version ({error}); use another --name"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Seal:
    """By what right, and where, this agent leads."""

    store: LeaseStore
    token: int
    run: str
    address: str
    """Of the agent's service."""
    rendezvous: str
    """Where workers of a generation find one another."""


class Reign:
    def __init__(
        self, request: RunRequest, observer: Observer, seal: Seal, *, nodes: int, patience: float
    ) -> None:
        """The job begins when `nodes` agents are there; one may be away for `patience` seconds."""
        self.seal, self._nodes = seal, nodes
        self.company = Company(
            request.program,
            store=lambda attempt: f"{seal.rendezvous}/{seal.run}-{attempt}",
            keep=self._keep,
            patience=patience,
        )
        self.leader = Leader(request, self.company, observer)
        self._facts = Facts()
        self._sessions: dict[str, Session] = {}
        self._behind: dict[str, float] = {}
        """By how many seconds a node's monotonic clock is behind ours."""
        self._stopping = False

    def begin(self, node: str, send: Send, workers: list[WorkerFacts], record: Record | None) -> None:
        """With this agent's own node; from the record of the leader before, if there was one."""
        self.company.came(node, send, _living(workers), time.monotonic())
        if record is not None:
            self.company.expect(_seats(record), time.monotonic())
            self.leader.take_over(record)
        self._hear(node, workers)

    # Nodes.

    def came(self, session: Session) -> None:
        """An agent attends, for the first time or again."""
        name, attending = session.node, session.attending
        if name in self._sessions:
            self._sessions[name].close()
        self._sessions[name] = session
        self._behind[name] = time.monotonic() - attending.clock
        session.send(Welcome(self.seal.run))
        workers = self._workers_of(attending)
        lost = self.company.came(name, session.send, _living(workers), time.monotonic())
        self._hear(name, workers)
        for seat in _living(workers):
            self.leader.back(seat)
        for seat in set(lost) - {facts.seat for facts in workers}:
            self.company.gone(seat)
            self.leader.lost(seat, f"its agent, {name}, has come back without it")

    def _workers_of(self, attending: Attending) -> list[WorkerFacts]:
        """Those of another run of the job do not count: their agent ends them."""
        return attending.workers if attending.run == self.seal.run else []

    def reported(self, session: Session, reports: list[Report]) -> None:
        if self._sessions.get(session.node) is session:
            for report in reports:
                self.take(session.node, report)

    def went(self, session: Session) -> None:
        if self._sessions.get(session.node) is session:
            del self._sessions[session.node]
            self.company.went(session.node, session.send, time.monotonic())

    def take(self, name: str, report: Report) -> None:
        """What a node's agent reports."""
        match report:
            case Said(seat=seat, message=message):
                if self._facts.is_news(seat, message):
                    self.leader.heard(seat, on_another_clock(message, self._behind.get(name, 0.0)))
            case Gone(seat=seat, code=code, evidence=evidence):
                self.company.gone(seat)
                if self._facts.has_gone(seat, code, evidence):
                    self.leader.exited(seat, code, evidence)
            case Asking(number=number, request=request):
                self.leader.asked(request, _Far(partial(self._pass_answer, name, number)))
            case Leaving():
                self.company.nodes[name].leaving = True

    def _hear(self, name: str, workers: list[WorkerFacts]) -> None:
        for facts in workers:
            for message in facts.said:
                self.take(name, Said(facts.seat, message))
            if facts.code is not None:
                self.take(name, Gone(facts.seat, facts.code, facts.evidence))

    def _pass_answer(self, name: str, number: int, reply: Reply) -> None:
        """To the agent at whose door the question came. If that is away, it will ask again."""
        if isinstance(reply, Status):
            nodes = tuple(sorted(self.company.present()))
            reply = msgspec.structs.replace(reply, leader=self.seal.address, nodes=nodes)
        node = self.company.nodes.get(name)
        if node is not None and node.send is not None:
            node.send(Answered(number, reply))

    # Time.

    def tick(self) -> None:
        """Begin when all are there, give up who is overdue, decide, free nodes."""
        if not self.leader.has_begun and len(self.company.present()) >= self._nodes:
            self.leader.begin()
        lost = self.company.overdue(time.monotonic())
        if self.leader.stopped_by_workers:
            lost = [(seat, "its agent was away, and it has left") for seat in self.company.out_of_reach()]
        for seat, why in lost:
            self.company.gone(seat)
            self.leader.lost(seat, why)
        self.leader.tick()
        self._free_nodes()

    def deadline(self) -> float | None:
        leaving = any(node.leaving for node in self.company.nodes.values())
        look = time.monotonic() + LOOK_AT_LEAVERS_S if leaving else None
        deadlines = (self.leader.deadline(), self.company.deadline(), look)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _free_nodes(self) -> None:
        """Workers of nodes that want to leave do so at a fence, then their agents may go. If all want to, the job stops."""
        present = self.company.present()
        leavers = [name for name in present if self.company.nodes[name].leaving]
        if not leavers:
            return
        if len(leavers) == len(present):
            if not self._stopping:
                self._stopping = True
                self.leader.signalled(signal.SIGTERM)
            return
        seats = [seat for name in leavers for seat in self.company.workers_of(name)]
        if seats:
            self.leader.free([seat.member for seat in seats])
        for name in leavers:
            send = self.company.nodes[name].send
            if send is not None and not self.company.workers_of(name):
                send(Dismissed())

    # The end.

    def conclude(self, outcome: Outcome) -> Over | None:
        """Keep how it ended, and tell all other nodes; None: that is not possible now."""
        text = f"digest {outcome.digest}" if outcome.digest is not None else "the job has ended"
        if outcome.failure is not None:
            text = f"the job has failed: {outcome.failure}"
        over = Over(outcome.exit_code, text)
        if not self._put(Kept(run=self.seal.run, over=over)):
            return None
        self.leader.close()
        for session in self._sessions.values():
            session.send(JobOver(over.code, over.text))
        return over

    def close(self) -> None:
        """After what has been sent."""
        for session in self._sessions.values():
            session.close()

    def _keep(self, record: Callable[[], Record]) -> bool:
        return self._put(Kept(run=self.seal.run, record=record()))

    def _put(self, kept: Kept) -> bool:
        try:
            self.seal.store.put(_RECORD, msgspec.msgpack.encode(kept), self.seal.token)
        except LeaseError:
            return False  # to be tried again; if the lease is over, the campaign will say so
        return True


def _living(workers: list[WorkerFacts]) -> list[Seat]:
    return [facts.seat for facts in workers if facts.code is None]


def _seats(record: Record) -> list[Seat]:
    """The workers that a job must have somewhere."""
    if record.coordinator is None:
        return []
    members = {*record.coordinator.members, *record.coordinator.newcomers}
    return [Seat(record.attempt, member) for member in sorted(members)]


@dataclass(frozen=True)
class _Far:
    """Who asked at an agent's door."""

    passes_on: Callable[[Reply], None]

    def answer(self, reply: Reply) -> None:
        self.passes_on(reply)

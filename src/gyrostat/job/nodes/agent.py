"""The agent of one node: it runs the job's workers there. One of the job's agents leads.

Each agent has a fork server, a worker pool, a control socket and a port for the others (`service`), and campaigns for the job's
lease. The agent that holds the lease leads (`leader_term`): its `leader` decides, and its `node_registry` carries the decisions
out on all nodes, its own included. The others follow: they report messages and exits of their workers, and carry out
instructions.

Workers do not need an agent to train. If an agent is killed, its fork server and workers live on; started again with the same
command, it finds them through its runtime directory (`agent_home`). If it led, another agent takes the lease when that expires,
reads the record that was kept under it, gets all nodes' reports, and continues. Requests without a reply are sent to the new
leader by the agents that received them (`pending_requests`).

All decisions are made in one thread, that of the event loop; threads of the service and of the campaign only post events.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import msgspec

from gyrostat.core.errors import LeaseError
from gyrostat.core.evidence import Evidence
from gyrostat.core.plural import plural
from gyrostat.job.control.control_socket import ControlSocket, runtime_directory
from gyrostat.job.control.event_loop import Loop
from gyrostat.job.control.observer import Observer
from gyrostat.job.control.replies import Requester
from gyrostat.job.control.requests import AskCheckpoint, Reply, Request
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.nodes.agent_home import RunMarker, locked_home
from gyrostat.job.nodes.leader_term import STORE_LOST, JobOutcome, LeaderTerm, LeaseGrant, read_kept
from gyrostat.job.nodes.lease import Campaign, LeaseStore
from gyrostat.job.nodes.messages import (
    ForwardedReply,
    ForwardedRequest,
    Instruct,
    JobOver,
    NodeAttending,
    NodeDismissed,
    NodeLeaving,
    NodeWelcome,
    Report,
    SignalWorker,
    StartWorker,
    TellWorker,
    WorkerFactsTable,
    WorkerGone,
    WorkerSaid,
)
from gyrostat.job.nodes.node_options import NodeOptions
from gyrostat.job.nodes.pending_requests import PendingRequests, ServiceRequester, SignalRequester
from gyrostat.job.nodes.rendezvous import serve_rendezvous
from gyrostat.job.nodes.service import LeaderLink, NodeSession, Service
from gyrostat.job.processes.output import LogFiles, OutputStream
from gyrostat.job.processes.protocol import FromWorker, Terminate, WorkerId
from gyrostat.job.processes.signals import SignalQueue
from gyrostat.job.processes.start import WorkerForkServer

logger = logging.getLogger(__name__)

_ATTEND_AGAIN_S = 0.2
_LOOK_AGAIN_S = 0.25


class Agent:
    """A context manager. `run` returns when the job has ended, or the node is free."""

    def __init__(
        self,
        request: RunRequest,
        options: NodeOptions,
        store: LeaseStore,
        observer: Observer,
        *,
        signals: SignalQueue | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        assert request.name is not None
        request.check()
        self._request, self._options, self._store, self._observer = request, options, store, observer
        self._tell = tell
        self._fields = {"job": request.name}
        self._facts = WorkerFactsTable()
        self._ranks: dict[WorkerId, int] = {}
        self._pending = PendingRequests(options.answer_within, time.monotonic())
        self._claim: int | None = None
        """The token of the lease under which this agent is about to lead."""
        self._term: LeaderTerm | None = None
        self._link: LeaderLink | None = None
        self._holder: str | None = None
        self._attend_at: float | None = None
        self._trouble = ""
        self._store_trouble = "none has been elected yet"
        self._welcomed = False
        """By the leader at the other end of the link."""
        self._leaving = False
        self._stop_by: float | None = None
        """The lease store has lost its data: when this agent ends, if its workers have not ended before."""
        self._result: JobOutcome | None = None
        with contextlib.ExitStack() as stack:
            self._open(stack, signals)
            self._closing = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, signals: SignalQueue | None) -> None:
        name = f"{self._request.name}.{self._options.node}"
        home = runtime_directory() / name
        stack.enter_context(locked_home(home, name))
        self._run_file = RunMarker(home)
        self._run = self._run_file.read()
        stack.callback(lambda: self._run_file.forget() if self._result is not None else None)
        parents = home / "fork-server.socket"
        found = WorkerForkServer.adopt(parents, self._options.node_timeout)
        self._source = found or WorkerForkServer(outlives=(parents, self._options.node_timeout))
        stack.callback(self._source.close)
        self._agent_socket = home / "agent.socket"
        self._loop = Loop(
            self._source,
            self,
            on_signal=self._signalled,
            on_request=self._take_request,
            boxes=home,
            signals=signals,
            control_socket=ControlSocket(name),
            logs=LogFiles(self._request.output.log_dir or home / "logs"),
            agent_socket=self._agent_socket,
        )
        stack.callback(self._loop.close)
        if found and found.children.run != (self._run or ""):
            for pid in found.children.living:
                found.signal(pid, signal.SIGKILL)
        elif found:
            self._loop.workers.adopt(found.children.living)
            for worker_id in found.children.living.values():
                self._facts.started(worker_id)
                self._local_rank(worker_id)
            for worker_id, code in found.children.exited:
                self._facts.has_gone(worker_id, code)
            self._tell(f"found {plural(len(found.children.living), 'worker')} of the previous agent")
        self._rendezvous = serve_rendezvous(self._source, self._options.host)
        self._service = Service(self._options.host, self._options.port, self._options.token, self)
        stack.callback(self._service.close)
        self.address = self._service.address
        self._campaign = Campaign(
            self._store,
            self.address,
            on_lead=lambda token: self._loop.inbox.post(partial(self._lead, token)),
            on_follow=lambda holder: self._loop.inbox.post(partial(self._follow, holder)),
            on_lost=lambda why: self._loop.inbox.post(partial(self._step_down, why)),
            on_trouble=lambda why: self._loop.inbox.post(partial(self._store_failed, why)),
            on_store_lost=lambda why: self._loop.inbox.post(partial(self._stop_without_leader, why)),
            timing=self._options.timing,
        )
        self._campaign.start()
        stack.callback(self._leave_campaign)

    def run(self) -> int:
        """The exit code: the job's, or 0 if the node left before."""
        self._loop.workers.take_exits()
        while self._result is None:
            wait = self._observer.ticked()
            self._loop.turn(*self._deadlines(), None if wait is None else time.monotonic() + wait)
            self._attend_if_due()
            self._lead_on()
            self._pending.tick(self._has_leader, self._store_trouble, time.monotonic())
            self._end_without_leader()
        if self._result.text:
            self._tell(self._result.text)
        return self._result.code

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def _deadlines(self) -> Iterator[float | None]:
        yield from (self._attend_at, self._stop_by, self._pending.deadline())
        if self._term is not None and self._leads(self._term):
            yield self._term.deadline()
        if self._claim is not None or self._term is not None:
            yield time.monotonic() + _LOOK_AGAIN_S

    @property
    def _has_leader(self) -> bool:
        return self._term is not None or self._welcomed

    def _leads(self, term: LeaderTerm) -> bool:
        """Whether it may act now: otherwise it is about to renew its lease, or to step down."""
        return self._campaign.token_now() == term.grant.token

    def _leave_campaign(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._term is not None:
            self._term.close()
        self._campaign.close()
        self._store.close()

    # WorkerListener: events of this node's workers.

    def received(self, worker_id: WorkerId, message: FromWorker) -> None:
        if self._facts.is_news(worker_id, message):
            self._report(WorkerSaid(worker_id, message))

    def printed(self, worker_id: WorkerId, stream: OutputStream, line: str) -> None:
        self._observer.printed(worker_id.member, stream, line)

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence) -> None:
        if self._facts.has_gone(worker_id, code, evidence):
            self._report(WorkerGone(worker_id, code, evidence))

    def _report(self, report: WorkerSaid | WorkerGone | ForwardedRequest | NodeLeaving) -> None:
        """To the leader; without one, the next leader gets it from `WorkerFactsTable`."""
        if self._term is not None:
            self._term.take(self._options.node, report)
        elif self._link is not None:
            self._link.send(report)

    # Following.

    def _follow(self, holder: str) -> None:
        logger.info("the lease is held by %s", holder, extra=self._fields)
        self._holder, self._attend_at = holder, time.monotonic()

    def _attend_if_due(self) -> None:
        if self._attend_at is None or time.monotonic() < self._attend_at or self._term is not None:
            return
        self._attend_at = None
        self._close_link()
        if self._holder is None or self._holder == self.address:
            return
        self._link = LeaderLink(
            self._holder,
            self._options.token,
            NodeAttending(self._options.node, self._run, self._facts.all(), time.monotonic()),
            obey=lambda link, instructs: self._loop.inbox.post(partial(self._obey_over, link, instructs)),
            broke=lambda link, why: self._loop.inbox.post(partial(self._broke, link, why)),
        )
        for message in self._pending.messages():
            self._link.send(message)
        if self._leaving:
            self._link.send(NodeLeaving())

    def _close_link(self) -> None:
        self._welcomed = False
        if self._link is not None:
            self._link.close()
            self._link = None

    def _obey_over(self, link: LeaderLink, instructs: list[Instruct]) -> None:
        for instruct in instructs:
            if link is self._link:
                self._obey(instruct)

    def _broke(self, link: LeaderLink, why: str) -> None:
        if link is not self._link:
            return
        self._welcomed = False
        self._attend_at = time.monotonic() + _ATTEND_AGAIN_S
        if why != self._trouble:
            self._trouble = why
            self._tell(f"cannot attend the agent at {link.address}: {why}; trying again")

    def _obey(self, instruct: Instruct) -> None:
        """Carry out an instruction of the leader."""
        workers = self._loop.workers
        match instruct:
            case NodeWelcome(run=run):
                self._trouble, self._welcomed = "", True
                self._belong_to(run)
                self._tell(f"following the agent at {self._holder}")
            case StartWorker(worker_id=worker_id, assignment=assignment, program=program):
                self._facts.forget_before(worker_id.attempt)
                self._facts.started(worker_id)
                request = replace(self._request, program=program)
                rank = self._local_rank(worker_id)
                spec = request.spec(replace(assignment, host=self._options.host), local_rank=rank)
                # A job without checkpoints would lose everything by stopping: it trains on.
                timeout = (
                    self._options.node_timeout / 2 if request.options.checkpoint is not None else math.inf
                )
                agent = str(self._agent_socket)
                spec = msgspec.structs.replace(
                    spec, worker_id=worker_id, run=self._run or "", agent=agent, agent_timeout_s=timeout
                )
                workers.start(worker_id, spec)
            case TellWorker(worker_id=worker_id, message=message):
                workers.send(worker_id, message)
            case SignalWorker(worker_id=worker_id, number=number):
                workers.signal(worker_id, number)
            case ForwardedReply(number=number, reply=reply):
                self._pending.answer(number, reply)
            case NodeDismissed():
                self._result = JobOutcome(0, "this node is free; the job goes on without it")
            case JobOver(code=code, text=text):
                self._result = JobOutcome(code, text)

    def _local_rank(self, worker_id: WorkerId) -> int:
        """The smallest number that no running worker of this node has."""
        living = set(self._loop.workers.living())
        self._ranks = {other: rank for other, rank in self._ranks.items() if other in living}
        taken = set(self._ranks.values())
        self._ranks[worker_id] = next(rank for rank in itertools.count() if rank not in taken)
        return self._ranks[worker_id]

    def _belong_to(self, run: str) -> None:
        """End workers of another run of the job, which has no leader any more."""
        if run != self._run:
            self._loop.workers.disown()
            self._facts = WorkerFactsTable()
        self._run = run
        self._run_file.write(run)

    # Requests of clients, and signals.

    def _take_request(self, request: Request, requester: Requester) -> None:
        self._report(self._pending.add(request, requester))

    def _store_failed(self, why: str) -> None:
        self._store_trouble = f"the lease store: {why}"
        self._tell(self._store_trouble)

    def _signalled(self, number: int) -> None:
        """The node leaves, and the job continues elsewhere; the last node stops the job. A second signal ends at once."""
        if number == signal.SIGUSR1:
            self._take_request(AskCheckpoint(), SignalRequester())
        elif self._leaving or (self._term is not None and len(self._term.registry.present()) == 1):
            if self._term is not None:
                self._term.leader.signalled(number)
            else:
                self._result = JobOutcome(128 + number, "left at once, and its workers with it")
        else:
            self._leaving = True
            self._tell("this node leaves: its workers do at the next fence")
            self._report(NodeLeaving())

    # Leading.

    def _lead(self, token: int) -> None:
        logger.info("lease acquired, token %d", token, extra=self._fields)
        self._claim = token
        self._close_link()
        self._holder = self._attend_at = None

    def _become_leader(self, token: int) -> None:
        """Lead a new run of the job, or continue the run of the previous leader."""
        try:
            kept = read_kept(self._store)
        except LeaseError:
            return  # tried again while this agent holds the lease
        self._claim = None
        if kept is None and self._facts.all():
            self._stop_without_leader("the record of this job is gone")
            return
        node, options = self._options.node, self._options
        if kept is not None and kept.over is not None:
            if kept.run == self._run:
                self._result = kept.over
                return
            kept = None
        run = kept.run if kept is not None else secrets.token_hex(8)
        self._belong_to(run)
        self._tell(f"leading, at {self.address}")
        grant = LeaseGrant(
            store=self._store, token=token, run=run, address=self.address, rendezvous=self._rendezvous
        )
        self._term = term = LeaderTerm(
            self._request, self._observer, grant, nodes=options.nodes, node_timeout=options.node_timeout
        )
        term.begin(node, self._obey, self._facts.all(), kept)
        for message in self._pending.messages():
            term.take(node, message)
        if self._leaving:
            term.take(node, NodeLeaving())

    def _step_down(self, why: str) -> None:
        logger.info("lease lost: %s", why, extra=self._fields)
        self._claim = None
        if self._term is None:
            return
        term, self._term = self._term, None
        term.close()
        if self._result is None:
            self._tell(f"leading no more: {why}")

    def _stop_without_leader(self, why: str) -> None:
        """The lease store has lost its data. Nobody knows what the last leader had decided, so nobody may lead: the job stops,
        with a checkpoint if it writes any."""
        self._tell(f"{STORE_LOST} ({why}), so the job has no leader any more: it stops")
        self._stop_by = time.monotonic() + self._options.node_timeout
        for worker_id in self._loop.workers.living():
            self._loop.workers.send(worker_id, Terminate())

    def _end_without_leader(self) -> None:
        if self._stop_by is not None and not (
            self._loop.workers.living() and time.monotonic() < self._stop_by
        ):
            text = "the same command continues from the newest checkpoint, or from the start"
            self._result = self._result or JobOutcome(1, f"{STORE_LOST}; {text}")

    def _lead_on(self) -> None:
        """Called in every turn of the loop."""
        if self._claim is not None and self._campaign.token_now() == self._claim:
            self._become_leader(self._claim)
        term = self._term
        if term is None or not self._leads(term):
            return
        term.tick()
        outcome = term.leader.outcome
        if outcome is not None and (over := term.conclude(outcome)) is not None:
            self._result = JobOutcome(over.code, "")

    # ServiceHandler: called from threads of the service.

    def came(self, session: NodeSession) -> None:
        self._loop.inbox.post(partial(self._session_came, session))

    def reported(self, session: NodeSession, reports: list[Report]) -> None:
        self._loop.inbox.post(partial(self._session_reported, session, reports))

    def went(self, session: NodeSession) -> None:
        self._loop.inbox.post(partial(self._session_went, session))

    def asked(self, request: Request, reply: Future[Reply]) -> None:
        self._loop.inbox.post(partial(self._take_request, request, ServiceRequester(reply)))

    def _session_came(self, session: NodeSession) -> None:
        if self._term is None or session.node == self._options.node:
            session.close()  # it looks again for the leader
        else:
            self._term.came(session)

    def _session_reported(self, session: NodeSession, reports: list[Report]) -> None:
        if self._term is not None:
            self._term.reported(session, reports)

    def _session_went(self, session: NodeSession) -> None:
        if self._term is not None:
            self._term.went(session)

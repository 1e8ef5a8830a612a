"""The agent of one node: it runs workers there, and one of the job's agents leads.

Agents are alike. Each has a fork parent, a crew of workers, a door, a port for the others (`service`), and campaigns for the
job's lease. Whoever holds it leads: its `leader` decides, and a `company` carries that out on all nodes, its own included. The
others attend the leader: they report what their workers say and how they exit, and do what they are told.

Workers do not need an agent to train. If one is killed, its fork parent and workers live on; started again with the same
command, it finds them through its runtime directory. If it led, another agent takes the lease when that expires, reads the
record that was kept under it, hears from all nodes what their workers know, and goes on. Requests that nobody has answered are
asked again by the agents at whose doors they came.

Everything is decided in one thread, that of the loop; threads of the service and of the campaign only post what happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from gyrostat.core.errors import Deposed, LeaseError, UsageError
from gyrostat.job.company import Company
from gyrostat.job.conversation import (
    Answered,
    Asking,
    Attending,
    Dismissed,
    Facts,
    Gone,
    Instruct,
    JobOver,
    Leaving,
    Report,
    Said,
    SignalWorker,
    StartWorker,
    TellWorker,
    Welcome,
    WorkerFacts,
    on_another_clock,
)
from gyrostat.job.door import AskCheckpoint, Door, Reply, Request, Status, runtime_directory
from gyrostat.job.leader import Leader, Record
from gyrostat.job.lease import Campaign, LeaseStore, Timing
from gyrostat.job.loop import Loop
from gyrostat.job.observer import Observer, Stream
from gyrostat.job.outcome import Outcome
from gyrostat.job.output import LogFiles
from gyrostat.job.protocol import FromWorker, Seat
from gyrostat.job.reception import Asker
from gyrostat.job.request import RunRequest
from gyrostat.job.service import Link, Service, Session
from gyrostat.job.signals import SignalQueue
from gyrostat.job.start import ForkParent

_RECORD = "record"
_ATTEND_AGAIN_S = 0.2
_CLAIM_AGAIN_S = 0.25
_LOOK_AT_LEAVERS_S = 0.1


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """One node's part in a job on several."""

    node: str
    """Its name; no two agents of a job have the same."""
    nodes: int
    """So many agents are waited for before the job begins."""
    host: str
    """Where this node is reached by the others."""
    port: int = 0
    token: str | None = None
    patience: float = 60.0
    """Seconds for which an agent may be away before its workers are given up. They give up in half the time."""
    timing: Timing = field(default_factory=Timing)


class Over(msgspec.Struct, frozen=True):
    code: int
    text: str


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in the lease store."""

    run: str
    """Which run of the job: the same name may be used again."""
    record: Record | None = None
    over: Over | None = None


@dataclass
class _Reign:
    """What an agent has while it leads."""

    token: int
    run: str
    company: Company
    leader: Leader
    facts: Facts
    sessions: dict[str, Session]
    behind: dict[str, float]
    """By how many seconds a node's monotonic clock is behind ours."""


class Agent:
    """Runs from entering `with` to leaving it; `run` returns when the job is over, or the node has been freed."""

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
        self._facts = Facts()
        self._ranks: dict[Seat, int] = {}
        self._questions: dict[int, tuple[Request, Asker]] = {}
        self._asked = 0
        self._claim: int | None = None
        """The token under which this agent is about to lead."""
        self._reign: _Reign | None = None
        self._link: Link | None = None
        self._holder: str | None = None
        self._attend_at: float | None = None
        self._trouble = ""
        self._leaving = False
        self._result: Over | None = None
        self.outcome: Outcome | None = None
        """Known to the agent that led last."""
        with contextlib.ExitStack() as stack:
            self._open(stack, signals)
            self._closing = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, signals: SignalQueue | None) -> None:
        name = f"{self._request.name}.{self._options.node}"
        home = runtime_directory() / name
        stack.enter_context(_alone_in(home, name))
        parents = home / "forkparent.socket"
        found = ForkParent.adopt(parents)
        self._source = found or ForkParent(outlives=(parents, self._options.patience / 2))
        stack.callback(self._source.close)
        self._run_file = home / "run"
        self._run = self._run_file.read_text() if found and self._run_file.exists() else None
        self._meeting_place = home / "agent.socket"
        self._loop = Loop(
            self._source,
            self,
            on_signal=self._signalled,
            on_request=self._take_question,
            signals=signals,
            door=Door(name),
            logs=LogFiles(self._request.log_dir or home / "logs"),
            meeting_place=self._meeting_place,
        )
        stack.callback(self._loop.close)
        for seat in found.children.living.values() if found else ():
            self._facts.started(seat)
        for seat, code in found.children.exited if found else ():
            self._facts.has_gone(seat, code)
        if found:
            self._loop.crew.adopt(found.children.living)
            for seat in found.children.living.values():
                self._local_rank(seat)
            self._tell(f"found {len(found.children.living)} workers of the agent before this one")
        self._rendezvous = self._serve_rendezvous(stack)
        self._service = Service(self._options.host, self._options.port, self._options.token, self)
        stack.callback(self._service.close)
        self.address = self._service.address
        self._campaign = Campaign(
            self._store,
            self.address,
            on_lead=lambda token: self._loop.inbox.post(partial(self._lead, token)),
            on_follow=lambda holder: self._loop.inbox.post(partial(self._follow, holder)),
            on_lost=lambda why: self._loop.inbox.post(partial(self._abdicate, why)),
            on_trouble=lambda why: self._loop.inbox.post(partial(self._tell, f"the lease store: {why}")),
            timing=self._options.timing,
        )
        self._campaign.start()
        stack.callback(self._leave_campaign)

    def _serve_rendezvous(self, stack: contextlib.ExitStack) -> str:
        """A process of its own serves it: a worker may leave, and gRPC's threads do not go with forks."""
        family = socket.AF_INET6 if ":" in self._options.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            try:
                listener.bind((self._options.host, 0))
            except OSError as error:
                raise UsageError(
                    f"cannot listen at {self._options.host} ({error}); name an address of this machine: --listen HOST"
                ) from error
            listener.listen(1024)
            host, port = listener.getsockname()[:2]
            stack.enter_context(self._source.serve_store(listener))
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def run(self) -> int:
        """The exit code: the job's, or 0 if the node was freed before."""
        self._loop.crew.take_exits()
        while self._result is None:
            wish = self._observer.ticked()
            self._loop.turn(*self._deadlines(), None if wish is None else time.monotonic() + wish)
            self._attend_if_due()
            self._lead_on()
        if self._result.text:
            self._tell(self._result.text)
        return self._result.code

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def _deadlines(self) -> Iterator[float | None]:
        yield self._attend_at
        if self._claim is not None:
            yield time.monotonic() + _CLAIM_AGAIN_S
        if self._reign is not None:
            yield self._reign.leader.deadline()
            yield self._reign.company.deadline()
            if any(node.leaving for node in self._reign.company.nodes.values()):
                yield time.monotonic() + _LOOK_AT_LEAVERS_S

    def _leave_campaign(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._reign is not None:
            for session in self._reign.sessions.values():
                session.close()
        self._campaign.close()
        self._store.close()

    # Ears: what workers of this node say.

    def heard(self, seat: Seat, message: FromWorker) -> None:
        if self._facts.is_news(seat, message):
            self._report(Said(seat, message))

    def printed(self, seat: Seat, stream: Stream, line: str) -> None:
        self._observer.printed(seat.member, stream, line)

    def exited(self, seat: Seat, code: int) -> None:
        if self._facts.has_gone(seat, code):
            self._report(Gone(seat, code))

    def _report(self, report: Said | Gone | Asking | Leaving) -> None:
        """To the leader; if there is none, it will hear of it when there is one."""
        if self._reign is not None:
            self._take_report(self._options.node, report)
        elif self._link is not None:
            self._link.send(report)

    # Following.

    def _follow(self, holder: str) -> None:
        self._holder, self._attend_at = holder, time.monotonic()

    def _attend_if_due(self) -> None:
        if self._attend_at is None or time.monotonic() < self._attend_at or self._reign is not None:
            return
        self._attend_at = None
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._holder is None or self._holder == self.address:
            return
        self._link = Link(
            self._holder,
            self._options.token,
            Attending(self._options.node, self._run, self._facts.all(), time.monotonic()),
            obey=lambda link, instructs: self._loop.inbox.post(partial(self._obey_over, link, instructs)),
            broke=lambda link, why: self._loop.inbox.post(partial(self._broke, link, why)),
        )
        for number, (request, _) in self._questions.items():
            self._link.send(Asking(number, request))
        if self._leaving:
            self._link.send(Leaving())

    def _obey_over(self, link: Link, instructs: list[Instruct]) -> None:
        for instruct in instructs:
            if link is self._link:
                self._obey(instruct)

    def _broke(self, link: Link, why: str) -> None:
        if link is not self._link:
            return
        self._attend_at = time.monotonic() + _ATTEND_AGAIN_S
        if why != self._trouble:
            self._trouble = why
            self._tell(f"cannot attend the agent at {link.address}: {why}; trying again")

    def _obey(self, instruct: Instruct) -> None:
        """What the leader says."""
        crew = self._loop.crew
        match instruct:
            case Welcome(run=run):
                self._trouble = ""
                self._belong_to(run)
                self._tell(f"following the agent at {self._holder}")
            case StartWorker(seat=seat, assignment=assignment, program=program):
                self._facts.forget_before(seat.attempt)
                self._facts.started(seat)
                request = replace(self._request, program=program)
                rank = self._local_rank(seat)
                spec = request.spec(replace(assignment, host=self._options.host), local_rank=rank)
                crew.start(seat, msgspec.structs.replace(spec, seat=seat, agent=str(self._meeting_place)))
            case TellWorker(seat=seat, message=message):
                crew.tell(seat, message)
            case SignalWorker(seat=seat, number=number):
                crew.signal(seat, number)
            case Answered(number=number, reply=reply):
                self._answer(number, reply)
            case Dismissed():
                self._result = Over(0, "this node is free; the job goes on without it")
            case JobOver(code=code, text=text):
                self._result = Over(code, text)

    def _local_rank(self, seat: Seat) -> int:
        """The smallest number that no living worker of this node has."""
        living = set(self._loop.crew.living())
        self._ranks = {other: rank for other, rank in self._ranks.items() if other in living}
        taken = set(self._ranks.values())
        self._ranks[seat] = next(rank for rank in itertools.count() if rank not in taken)
        return self._ranks[seat]

    def _belong_to(self, run: str) -> None:
        """Workers of another run of the job, which nobody leads any more, are ended."""
        if run != self._run:
            for seat in self._loop.crew.living():
                self._loop.crew.signal(seat, signal.SIGKILL)
            self._facts = Facts()
        self._run = run
        self._run_file.write_text(run)

    # Questions of clients.

    def _take_question(self, request: Request, asker: Asker) -> None:
        self._asked += 1
        self._questions[self._asked] = request, asker
        self._report(Asking(self._asked, request))

    def _answer(self, number: int, reply: Reply) -> None:
        if number in self._questions:
            self._questions.pop(number)[1].answer(reply)

    def _signalled(self, number: int) -> None:
        """A node that is told to end is freed, and the job goes on elsewhere; the last one stops the job."""
        if number == signal.SIGUSR1:
            self._take_question(AskCheckpoint(), _Deaf())
        elif self._leaving or (self._reign is not None and len(self._reign.company.present()) == 1):
            if self._reign is not None:
                self._reign.leader.signalled(number)
            else:
                self._result = Over(128 + number, "left at once, and its workers with it")
        else:
            self._leaving = True
            self._tell("this node leaves: its workers do at the next fence")
            self._report(Leaving())

    # Leading.

    def _lead(self, token: int) -> None:
        self._claim = token
        if self._link is not None:
            self._link.close()
            self._link = None
        self._holder = None

    def _ascend(self, token: int) -> None:
        """Begin to lead: a new run of the job, or where another agent left off."""
        try:
            kept = self._read()
        except LeaseError:
            return  # tried again while the lease is ours
        self._claim = None
        if kept is not None and kept.over is not None:
            if kept.run == self._run:
                self._result = kept.over
                return
            kept = None
        run = kept.run if kept is not None else secrets.token_hex(8)
        node = self._options.node
        company = Company(
            self._request.program,
            store=lambda attempt: f"{self._rendezvous}/{run}-{attempt}",
            keep=partial(self._keep, token, run),
            patience=self._options.patience,
        )
        leader = Leader(self._request, company, self._observer)
        self._reign = _Reign(token, run, company, leader, Facts(), {}, {})
        known = self._facts.all() if run == self._run else []
        self._belong_to(run)
        self._tell(f"leading, at {self.address}")
        company.came(node, self._obey, _living(known), time.monotonic())
        if kept is not None and kept.record is not None:
            company.expect(_seats(kept.record), time.monotonic())
            leader.take_over(kept.record)
        self._hear_facts(node, known)
        for number, (request, _) in self._questions.items():
            self._take_report(node, Asking(number, request))
        if self._leaving:
            self._take_report(node, Leaving())

    def _read(self) -> Kept | None:
        data = self._store.get(_RECORD)
        return None if data is None else msgspec.msgpack.decode(data, type=Kept)

    def _keep(self, token: int, run: str, record: Callable[[], Record]) -> bool:
        return self._put(token, Kept(run=run, record=record()))

    def _put(self, token: int, kept: Kept) -> bool:
        try:
            self._store.put(_RECORD, msgspec.msgpack.encode(kept), token)
            return True
        except Deposed:
            return False  # the campaign will say so
        except LeaseError:
            return False

    def _abdicate(self, why: str) -> None:
        self._claim = None
        if self._reign is None:
            return
        reign, self._reign = self._reign, None
        for session in reign.sessions.values():
            session.close()
        if self._result is None:
            self._tell(f"leading no more: {why}")

    def _lead_on(self) -> None:
        """Time has passed: begin when all are there, give up who is overdue, free nodes, end."""
        if self._claim is not None and self._campaign.token_now() == self._claim:
            self._ascend(self._claim)
        reign = self._reign
        if reign is None or self._campaign.token_now() != reign.token:
            return
        if not reign.leader.has_begun and len(reign.company.present()) >= self._options.nodes:
            reign.leader.begin()
        lost = reign.company.overdue(time.monotonic())
        if reign.leader.stopped_by_workers:
            lost = [(seat, "its agent was away, and it has left") for seat in reign.company.out_of_reach()]
        for seat, why in lost:
            reign.company.gone(seat)
            reign.leader.lost(seat, why)
        reign.leader.tick()
        self._free_nodes(reign)
        if reign.leader.outcome is not None:
            self._conclude(reign, reign.leader.outcome)

    def _conclude(self, reign: _Reign, outcome: Outcome) -> None:
        text = f"digest {outcome.digest}" if outcome.digest is not None else "the job has ended"
        if outcome.failure is not None:
            text = f"the job has failed: {outcome.failure}"
        over = Over(outcome.exit_code, text)
        if not self._put(reign.token, Kept(run=reign.run, over=over)):
            return  # later, or another will
        reign.leader.close()
        for session in reign.sessions.values():
            session.send(JobOver(over.code, over.text))
        self.outcome, self._result = outcome, Over(over.code, "")
        self._observer.over(outcome)

    def _free_nodes(self, reign: _Reign) -> None:
        """Nodes that want to leave: their workers leave at a fence, then their agents may go."""
        company = reign.company
        leavers = [name for name in company.present() if company.nodes[name].leaving]
        seats = [seat for name in leavers for seat in company.workers_of(name)]
        if not leavers:
            return
        if seats and len(leavers) < len(company.present()):
            reign.leader.free([seat.member for seat in seats])
        for name in leavers:
            if not company.workers_of(name) and name == self._options.node:
                self._result = Over(0, "this node is free; the job goes on without it")
            elif not company.workers_of(name) and name in reign.sessions:
                reign.sessions[name].send(Dismissed())

    def _hear_facts(self, name: str, workers: list[WorkerFacts]) -> None:
        for facts in workers:
            for message in facts.said:
                self._take_report(name, Said(facts.seat, message))
            if facts.code is not None:
                self._take_report(name, Gone(facts.seat, facts.code))

    def _take_report(self, name: str, report: Report) -> None:
        reign = self._reign
        assert reign is not None
        match report:
            case Said(seat=seat, message=message):
                if reign.facts.is_news(seat, message):
                    reign.leader.heard(seat, on_another_clock(message, reign.behind.get(name, 0.0)))
            case Gone(seat=seat, code=code):
                reign.company.gone(seat)
                if reign.facts.has_gone(seat, code):
                    reign.leader.exited(seat, code)
            case Asking(number=number, request=request):
                reign.leader.asked(request, _Far(partial(self._pass_answer, name, number)))
            case Leaving():
                reign.company.nodes[name].leaving = True

    def _pass_answer(self, name: str, number: int, reply: Reply) -> None:
        """To the agent at whose door the question came. If that is away, it will ask again."""
        if isinstance(reply, Status) and self._reign is not None:
            nodes = tuple(sorted(self._reign.company.present()))
            reply = msgspec.structs.replace(reply, leader=self.address, nodes=nodes)
        if name == self._options.node:
            self._answer(number, reply)
        elif self._reign is not None and name in self._reign.sessions:
            self._reign.sessions[name].send(Answered(number, reply))

    # Host of the service: called from its threads.

    def came(self, session: Session) -> None:
        self._loop.inbox.post(partial(self._session_came, session))

    def reported(self, session: Session, reports: list[Report]) -> None:
        self._loop.inbox.post(partial(self._session_reported, session, reports))

    def went(self, session: Session) -> None:
        self._loop.inbox.post(partial(self._session_went, session))

    def asked(self, request: Request, reply: Future[Reply]) -> None:
        self._loop.inbox.post(partial(self._take_question, request, _Promise(reply)))

    def _session_came(self, session: Session) -> None:
        reign = self._reign
        if reign is None or session.node == self._options.node:
            session.close()  # it will look again who leads
            return
        if session.node in reign.sessions:
            reign.sessions[session.node].close()
        reign.sessions[session.node] = session
        reign.behind[session.node] = time.monotonic() - session.attending.clock
        session.send(Welcome(reign.run))
        known = session.attending.workers if session.attending.run == reign.run else []
        lost = reign.company.came(session.node, session.send, _living(known), time.monotonic())
        self._hear_facts(session.node, known)
        for seat in _living(known):
            reign.leader.back(seat)
        for seat in set(lost) - {facts.seat for facts in known}:
            reign.company.gone(seat)
            reign.leader.lost(seat, f"its agent, {session.node}, has come back without it")

    def _session_reported(self, session: Session, reports: list[Report]) -> None:
        for report in reports:
            if self._reign is not None and self._reign.sessions.get(session.node) is session:
                self._take_report(session.node, report)

    def _session_went(self, session: Session) -> None:
        reign = self._reign
        if reign is not None and reign.sessions.get(session.node) is session:
            del reign.sessions[session.node]
            reign.company.went(session.node, session.send, time.monotonic())


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
    """Who asked at another agent's door."""

    passes_on: Callable[[Reply], None]

    def answer(self, reply: Reply) -> None:
        self.passes_on(reply)


@dataclass(frozen=True)
class _Promise:
    """Who asked through the service."""

    reply: Future[Reply]

    def answer(self, reply: Reply) -> None:
        if not self.reply.cancelled():
            with contextlib.suppress(Exception):  # cancelled in this very moment
                self.reply.set_result(reply)


class _Deaf:
    """A signal: it cannot be answered."""

    def answer(self, reply: Reply) -> None:
        pass


@contextlib.contextmanager
def _alone_in(home: Path, name: str) -> Iterator[None]:
    """While this lasts, `home` is this agent's; what one that was killed left there is kept."""
    home.mkdir(mode=0o700, exist_ok=True)
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"an agent of {name!r} is running on this machine already; give this one another name: --node NAME"
            ) from None
        yield

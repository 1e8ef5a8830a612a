"""The service on a real port: what it lets in, and what it refuses."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import Future

import grpc
import msgspec
import pytest

from gyrostat.core.errors import UsageError
from gyrostat.job.control.requests import AskStatus, Reply, Request, RequestResult, Scale
from gyrostat.job.nodes.messages import (
    LARGEST,
    SERVICE,
    Instruct,
    NodeAttending,
    NodeWelcome,
    Report,
    WorkerFacts,
    WorkerFactsTable,
    WorkerGone,
    WorkerSaid,
    decode_reports,
    encode,
)
from gyrostat.job.nodes.service import AgentClient, LeaderLink, NodeSession, Service, Unavailable, is_loopback
from gyrostat.job.processes.protocol import GenerationPrepared, Logged, WorkerEnded, WorkerId

TIMEOUT_S = 120.0
SEAT = WorkerId(0, 3)
ME = NodeAttending("b", None, [WorkerFacts(SEAT, [GenerationPrepared(4)])])


class Host:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[object] = queue.SimpleQueue()

    def came(self, session: NodeSession) -> None:
        self.news.put(session)

    def reported(self, session: NodeSession, reports: list[Report]) -> None:
        for report in reports:
            self.news.put(report)

    def went(self, session: NodeSession) -> None:
        self.news.put("went")

    def asked(self, request: Request, reply: Future[Reply]) -> None:
        reply.set_result(RequestResult(True, f"heard {type(request).__name__}"))


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def service(host: Host) -> Iterator[Service]:
    served = Service("127.0.0.1", 0, "secret", host)
    yield served
    served.close()


def test_a_client_asks(service: Service) -> None:
    client = AgentClient(service.address, "secret")
    assert client.ask(Scale("r", 3)) == RequestResult(True, "heard Scale")
    assert client.ask(AskStatus()) == RequestResult(True, "heard AskStatus")
    client.close()


@pytest.mark.parametrize("token", [None, "", "secre", "secret "])
def test_a_wrong_token_is_refused(service: Service, token: str | None) -> None:
    client = AgentClient(service.address, token)
    with pytest.raises(UsageError, match="token is missing or wrong; set GYROSTAT_TOKEN"):
        client.ask(AskStatus())
    client.close()


def test_an_agent_attends(service: Service, host: Host) -> None:
    obeyed: queue.SimpleQueue[list[Instruct]] = queue.SimpleQueue()
    broken: queue.SimpleQueue[str] = queue.SimpleQueue()
    link = LeaderLink(
        service.address,
        "secret",
        ME,
        obey=lambda link, instructs: obeyed.put(instructs),
        broke=lambda link, why: broken.put(why),
    )
    session = host.news.get(timeout=TIMEOUT_S)
    assert isinstance(session, NodeSession)
    assert session.attending == ME
    session.send(NodeWelcome("run"))
    assert obeyed.get(timeout=TIMEOUT_S) == [NodeWelcome("run")]
    link.send(WorkerGone(SEAT, -9))
    assert host.news.get(timeout=TIMEOUT_S) == WorkerGone(SEAT, -9)
    session.close()
    assert broken.get(timeout=TIMEOUT_S) == "the leader closed the connection"
    link.close()
    assert host.news.get(timeout=TIMEOUT_S) == "went"


def test_an_agent_that_goes_away_is_missed(service: Service, host: Host) -> None:
    link = LeaderLink(
        service.address, "secret", ME, obey=lambda link, instructs: None, broke=lambda link, why: None
    )
    assert isinstance(host.news.get(timeout=TIMEOUT_S), NodeSession)
    link.close()
    assert host.news.get(timeout=TIMEOUT_S) == "went"


def test_a_wrong_token_is_an_error(service: Service) -> None:
    broken: queue.SimpleQueue[str] = queue.SimpleQueue()
    link = LeaderLink(
        service.address,
        "wrong",
        ME,
        obey=lambda link, instructs: None,
        broke=lambda link, why: broken.put(why),
    )
    assert broken.get(timeout=TIMEOUT_S) == "UNAUTHENTICATED: the token is missing or wrong"
    link.close()


@pytest.mark.parametrize(
    ("method", "data", "code"),
    [
        ("Ask", b"\xc1 no msgpack", grpc.StatusCode.INVALID_ARGUMENT),
        ("Ask", msgspec.msgpack.encode({"type": "Explode"}), grpc.StatusCode.INVALID_ARGUMENT),
        ("Ask", msgspec.msgpack.encode({"type": "Scale", "workers": "3"}), grpc.StatusCode.INVALID_ARGUMENT),
        ("Ask", b"", grpc.StatusCode.INVALID_ARGUMENT),
        ("Ask", b"x" * (LARGEST + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("RequestResult", b"", grpc.StatusCode.UNIMPLEMENTED),
    ],
    ids=["garbage", "unknown", "mistyped", "empty", "too large", "no such method"],
)
def test_what_is_no_request_is_refused(
    service: Service, method: str, data: bytes, code: grpc.StatusCode
) -> None:
    with grpc.insecure_channel(service.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        with pytest.raises(grpc.RpcError) as refusal:
            call(data, metadata=[("authorization", "Bearer secret")], timeout=TIMEOUT_S)
        assert refusal.value.code() is code
    client = AgentClient(service.address, "secret")
    assert client.ask(AskStatus()) == RequestResult(True, "heard AskStatus")  # and it serves on
    client.close()


@pytest.mark.parametrize(
    "first",
    [b"garbage", encode([WorkerGone(SEAT, 0)]), encode([])],
    ids=["garbage", "not who it is", "nothing"],
)
def test_an_agent_that_does_not_identify_itself_is_refused(service: Service, first: bytes) -> None:
    with grpc.insecure_channel(service.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Attend")
        with pytest.raises(grpc.RpcError) as refusal:
            next(call(iter([first]), metadata=[("authorization", "Bearer secret")], timeout=TIMEOUT_S))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_garbage_ends_an_attendance(service: Service, host: Host) -> None:
    with grpc.insecure_channel(service.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Attend")
        list(
            call(
                iter([encode([ME]), b"garbage"]),
                metadata=[("authorization", "Bearer secret")],
                timeout=TIMEOUT_S,
            )
        )
    assert isinstance(host.news.get(timeout=TIMEOUT_S), NodeSession)
    assert host.news.get(timeout=TIMEOUT_S) == "went"


def test_without_a_token_only_on_loopback(host: Host) -> None:
    with pytest.raises(UsageError, match=r"listens at 0\.0\.0\.0 .* set GYROSTAT_TOKEN"):
        Service("0.0.0.0", 0, None, host)
    assert [
        is_loopback(name) for name in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "10.0.0.1", "host")
    ] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    open_one = Service("127.0.0.1", 0, None, host)
    client = AgentClient(open_one.address, None)
    assert client.ask(AskStatus()) == RequestResult(True, "heard AskStatus")
    client.close()
    open_one.close()


def test_nobody_there() -> None:
    client = AgentClient("127.0.0.1:1", None)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 did not answer \(UNAVAILABLE\)"):
        client.ask(AskStatus())
    client.close()


def test_facts_are_the_last_of_each_kind_and_news_only_once() -> None:
    facts = WorkerFactsTable()
    assert facts.is_news(SEAT, GenerationPrepared(2))
    assert not facts.is_news(SEAT, GenerationPrepared(2))
    assert facts.is_news(SEAT, WorkerEnded(stopped=False))
    assert facts.is_news(SEAT, GenerationPrepared(3))
    assert facts.is_news(SEAT, Logged(1, {}))
    assert facts.is_news(SEAT, Logged(1, {}))  # of no lasting meaning: always news
    assert facts.has_gone(SEAT, 0)
    assert not facts.has_gone(SEAT, 0)
    facts.started(WorkerId(1, 0))
    assert facts.all() == [
        WorkerFacts(SEAT, [WorkerEnded(stopped=False), GenerationPrepared(3)], 0),
        WorkerFacts(WorkerId(1, 0), []),
    ]
    facts.forget_before(1)
    assert facts.all() == [WorkerFacts(WorkerId(1, 0), [])]


def test_reports_survive_the_wire() -> None:
    reports: list[Report] = [WorkerSaid(SEAT, GenerationPrepared(4)), WorkerGone(SEAT, 0)]
    assert decode_reports(encode(reports)) == reports

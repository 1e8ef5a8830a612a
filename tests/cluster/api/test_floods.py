"""One client cannot take the API away from others: it leaves, is silent, or asks for everything at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gyrostat.cluster.api import admission, connections
from gyrostat.cluster.api.admission import Admission, RequestKind
from gyrostat.cluster.api.problem import ApiError
from gyrostat.cluster.api.tokens import Principal
from gyrostat.core.errors import UsageError
from tests.cluster.quiet_cluster import Guarded, Quiet

TIMEOUT_S = 60.0


def connect(guarded: Guarded) -> socket.socket:
    host, _, port = guarded.server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def request(guarded: Guarded, who: str, path: str) -> bytes:
    secret = guarded.secrets[who]
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()


def waits_for_news(guarded: Guarded, who: str = "mallory") -> socket.socket:
    connection = connect(guarded)
    connection.sendall(request(guarded, who, "/v1/events?wait=60"))
    return connection


def answer(connection: socket.socket) -> tuple[int, dict[str, object]]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


def test_clients_that_leave_are_noticed(guarded: Guarded) -> None:
    """600 requests that wait a minute, closed at once, shut the API for as long."""
    for _ in range(600):
        waits_for_news(guarded).close()
    with guarded.cluster("operator") as operator, guarded.cluster("alice") as alice:
        assert (operator.jobs(), alice.jobs()) == ((), ())
        deadline = time.monotonic() + TIMEOUT_S / 2
        while guarded.server.requests:
            assert time.monotonic() < deadline, f"{guarded.server.requests} requests of nobody"
            operator.jobs()


def test_silent_connections_make_room(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token, with half a header, and after an answer."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    with contextlib.ExitStack() as stack:
        for number in range(30):
            connection = stack.enter_context(connect(guarded))
            if number % 3:
                connection.sendall(b"GET /v1 HTTP/1.1\r\nHost: x\r\n" + b"\r\n" * (number % 3 - 1))
        for who in ("operator", "alice"):
            assert stack.enter_context(guarded.cluster(who)).jobs() == ()


def test_a_client_whose_idle_connection_was_closed_connects_again(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    with (
        guarded.cluster("operator") as first,
        guarded.cluster("alice") as second,
        guarded.cluster("mallory") as third,
    ):
        for _ in range(3):
            assert [client.jobs() for client in (first, second, third)] == [()] * 3


def test_requests_that_are_sent_ahead_are_not_answered(guarded: Guarded) -> None:
    """One answer, and the connection is closed: its client cannot queue up work that others have to wait for."""
    with connect(guarded) as connection:
        connection.sendall(request(guarded, "mallory", "/v1/jobs") * 20)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(1 << 16):
                received += data
    assert received.count(b"HTTP/1.1 ") == 1


def test_an_address_has_a_limit_of_its_own(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its idle connections make room for its own; if none is idle, the new one is closed."""
    monkeypatch.setattr(connections, "MAX_OF_ADDRESS", 2)
    with waits_for_news(guarded), waits_for_news(guarded):
        until_waiting(guarded, 2)
        with connect(guarded) as third, contextlib.suppress(ConnectionResetError):
            assert third.recv(1) == b""
        assert guarded.server.requests == 2


def until_waiting(guarded: Guarded, number: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while guarded.server.requests < number:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_tenant_that_asks_for_everything_at_once_is_refused_and_others_are_served(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(admission.LIMITS, RequestKind.WAITING, 2)
    monkeypatch.setitem(admission.LIMITS, RequestKind.ANY, 3)
    with waits_for_news(guarded), waits_for_news(guarded):
        until_waiting(guarded, 2)
        with waits_for_news(guarded) as third:
            status, problem = answer(third)
        assert (status, problem["code"]) == (429, "too_many_requests")
        assert problem["message"] == (
            "you have 2 requests that wait for new data in progress, which is the limit; try again later"
        )
        for who in ("mallory", "alice", "operator"):
            with guarded.cluster(who) as cluster:
                assert cluster.jobs() == ()
        with waits_for_news(guarded, "alice"):
            until_waiting(guarded, 3)
            with guarded.cluster("operator") as operator:
                assert operator.jobs() == ()


def test_slow_requests_of_a_tenant_are_limited(
    guarded: Guarded, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(admission.LIMITS, RequestKind.SLOW, 0)
    with guarded.cluster("mallory") as mallory, guarded.cluster("operator") as operator:
        mallory.submit(guarded.spec("mallory", name="mine"))
        with pytest.raises(UsageError, match="you have 0 requests that wait for a job in progress"):
            mallory.migrate("mine")
        assert operator.migrate("mine").text == "moved"


@contextlib.contextmanager
def admitted(admission: Admission, principals: list[Principal]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for principal in principals:
            stack.enter_context(admission.request(principal))
        yield


def test_all_tenants_together_leave_room_for_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ALL_TENANTS", 3)
    found = Admission()
    tenants = [Principal(tenant=name) for name in "abc"]
    with admitted(found, tenants):
        with (
            pytest.raises(ApiError, match="3 requests of all tenants are in progress"),
            admitted(found, tenants[:1]),
        ):
            pass
        with admitted(found, [Principal(tenant="ops", operator=True)]):
            pass
    with admitted(found, tenants):
        pass

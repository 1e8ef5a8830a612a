"""Requests to etcd's v3 API through the JSON gateway that every etcd server has, with the standard library's HTTP client.

Why not a library: python-etcd3, etcd3-py and etcetra are unmaintained or pin an old gRPC, etcd3gw cannot log in, aetcd is one
person's and asyncio only. Why not gRPC: forking beside a channel fails now and then, and a lease needs nine requests.

Servers are tried in turn, beginning with the one that answered last. Every request made here can be sent twice without harm,
so one that broke off is sent again; if none answers, `StoreUnreachable`.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from gyrostat.core.errors import StoreRefused, StoreUnreachable
from gyrostat.job.nodes.lease.etcd_messages import Authenticated, EtcdFailure, M, Streamed, Watched, decode

TIMEOUT_S = 1.0
_PART = 1 << 16
_RETRY_CODES = frozenset({1, 4, 8, 10, 14})
"""gRPC's Cancelled, DeadlineExceeded, ResourceExhausted, Aborted, Unavailable: etcd is starting, electing or overloaded."""
_UNAUTHENTICATED = 16
_BROKEN = (OSError, http.client.HTTPException, ValueError)
"""What a connection raises that broke, also when another thread shut it down."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Where etcd is, and how to log in."""

    endpoints: tuple[tuple[str, int], ...]
    tls: ssl.SSLContext | None = None
    user: str | None = None
    password: str = ""

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.endpoints)


class Gateway:
    """Any number of threads may send requests; each has a connection to itself while it waits."""

    def __init__(self, servers: Servers, timeout: float = TIMEOUT_S) -> None:
        self.servers = servers
        self._timeout = timeout
        self._guard = threading.Lock()
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []
        self._preferred = 0
        self._token: str | None = None

    def call(self, path: str, request: object, answer: type[M]) -> M:
        """Send a request to the first server that answers, logging in when that is asked for."""
        if self.servers.user is not None and self._token is None:
            self._log_in()
        status, data = self._post(path, request)
        if _failure(status, data).code == _UNAUTHENTICATED and self.servers.user is not None:
            self._log_in()
            status, data = self._post(path, request)
        return self._decoded(path, status, data, answer)

    def stream(self, path: str, request: object) -> ResponseStream:
        """Send a request that is answered by lines, as long as the connection lasts."""
        index, connection = self._connect(self._preferred)
        try:
            connection.request("POST", path, msgspec.json.encode(request), self._headers())
            # Before the response takes the socket over: `close` must reach it from another thread.
            sock = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                self._decoded(path, response.status, response.read(), Streamed)
            _keep_alive(sock)
        except _BROKEN as error:
            connection.close()
            self._preferred = (index + 1) % len(self.servers.endpoints)
            raise self._unreachable(error) from error
        except BaseException:
            connection.close()
            raise
        return ResponseStream(connection, sock, response)

    def close(self) -> None:
        with self._guard:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _log_in(self) -> None:
        path = "/v3/auth/authenticate"
        self._token = None
        status, data = self._post(path, {"name": self.servers.user, "password": self.servers.password})
        self._token = self._decoded(path, status, data, Authenticated).token

    def _post(self, path: str, request: object) -> tuple[int, bytes]:
        body = msgspec.json.encode(request)
        trouble: Exception | None = None
        hang: set[int] = set()
        for index, connection in self._connections():
            if index in hang:
                continue
            try:
                connection.request("POST", path, body, self._headers())
                response = connection.getresponse()
                data = response.read()
            except _BROKEN as error:
                connection.close()
                trouble = error
                if isinstance(error, TimeoutError):
                    hang.add(index)
                continue
            with self._guard:
                self._idle.append((index, connection))
                self._preferred = index
            if _failure(response.status, data).code in _RETRY_CODES and len(self.servers.endpoints) > 1:
                trouble = StoreRefused(_failure(response.status, data).error)
                continue
            return response.status, data
        raise self._unreachable(trouble) from trouble

    def _connections(self) -> Iterator[tuple[int, http.client.HTTPConnection]]:
        """What to try: connections that are open but may have died meanwhile, then a new one to every server in turn."""
        with self._guard:
            kept = self._idle.pop() if self._idle else None
            first = self._preferred
        if kept is not None:
            yield kept
        for offset in range(len(self.servers.endpoints)):
            yield self._connect(first + offset)

    def _connect(self, number: int) -> tuple[int, http.client.HTTPConnection]:
        """Nothing is sent before the first request."""
        index = number % len(self.servers.endpoints)
        host, port = self.servers.endpoints[index]
        if self.servers.tls is None:
            return index, http.client.HTTPConnection(host, port, timeout=self._timeout)
        return index, http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self.servers.tls)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers if self._token is None else headers | {"Authorization": self._token}

    def _decoded(self, path: str, status: int, data: bytes, answer: type[M]) -> M:
        if status == 200:
            try:
                return decode(data, answer)
            except msgspec.MsgspecError as error:
                raise StoreRefused(
                    f"{self.servers} answered {path} with what etcd never says ({error}): {data[:80]!r}"
                ) from error
        failure = _failure(status, data)
        if failure.code in _RETRY_CODES:
            raise StoreUnreachable(f"etcd at {self.servers} cannot serve {path} now: {failure.error}")
        raise StoreRefused(f"etcd at {self.servers} refused {path}: {failure.error}")

    def _unreachable(self, error: Exception | None) -> StoreUnreachable:
        return StoreUnreachable(f"no answer from etcd at {self.servers}: {error}")


class ResponseStream:
    """Lines of an answer that goes on. `close` may be called from another thread and ends the iteration."""

    def __init__(
        self, connection: http.client.HTTPConnection, sock: socket.socket, response: http.client.HTTPResponse
    ) -> None:
        self._connection, self._sock, self._response = connection, sock, response

    def __iter__(self) -> Iterator[Watched]:
        """Ends when the connection does, or what comes is not a line of a watch."""
        rest = b""
        with contextlib.suppress(msgspec.MsgspecError, *_BROKEN):
            while part := self._response.read1(_PART):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    message = decode(line, Streamed)
                    if message.result is None:
                        return
                    yield message.result

    def close(self) -> None:
        with contextlib.suppress(*_BROKEN):
            self._sock.shutdown(socket.SHUT_RDWR)

    def discard(self) -> None:
        """By the thread that iterated."""
        self._response.close()
        self._connection.close()


def _failure(status: int, data: bytes) -> EtcdFailure:
    """What a response that is not 200 says."""
    if status == 200:
        return EtcdFailure("", 0)
    try:
        return decode(data, EtcdFailure)
    except msgspec.MsgspecError:
        return EtcdFailure(f"HTTP status {status}: {data[:80]!r}")


def _keep_alive(sock: socket.socket) -> None:
    """A stream may be silent for hours; a server that vanished is to be noticed in about ten seconds."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

"""Requests to etcd's v3 API through the JSON gateway of every etcd server, with the standard library's HTTP client.

Why not a library: python-etcd3, etcd3-py and etcetra are unmaintained or pin an old gRPC, etcd3gw cannot authenticate, aetcd
has one maintainer and is asyncio only. Why not gRPC: forking with an open channel fails at times, and a lease needs nine
requests.

Servers are tried in turn, starting with the one that answered last. Every request is idempotent, so a broken one is sent again;
if no server answers, `StoreUnreachable` is raised.
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

from gyrostat.core.errors import LeaseError, StoreRefused, StoreUnreachable
from gyrostat.job.nodes.lease.etcd_messages import Authenticated, EtcdFailure, M, Streamed, Watched, decode

TIMEOUT_S = 1.0
_PART = 1 << 16
_RETRY_CODES = frozenset({1, 4, 8, 10, 14})
"""gRPC's Cancelled, DeadlineExceeded, ResourceExhausted, Aborted, Unavailable: etcd is starting, electing or overloaded."""
_UNAUTHENTICATED = 16
_BROKEN = (OSError, http.client.HTTPException, ValueError)
"""Raised by a broken connection, also when another thread shut it down."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The addresses of etcd, and the credentials."""

    endpoints: tuple[tuple[str, int], ...]
    tls: ssl.SSLContext | None = None
    user: str | None = None
    password: str = ""

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.endpoints)


class Gateway:
    """Thread-safe; each thread has a connection of its own while it waits."""

    def __init__(self, servers: Servers, timeout: float = TIMEOUT_S) -> None:
        self.servers = servers
        self._timeout = timeout
        self._guard = threading.Lock()
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []
        self._preferred = 0
        self._token: str | None = None

    def call(self, path: str, request: object, answer: type[M]) -> M:
        """Send a request to the first server that answers; authenticates if etcd requires it."""
        if self.servers.user is not None and self._token is None:
            self._authenticate()
        status, data = self._post(path, request)
        if _failure(status, data).code == _UNAUTHENTICATED and self.servers.user is not None:
            self._authenticate()
            status, data = self._post(path, request)
        return self._decoded(path, status, data, answer)

    def stream(self, path: str, request: object) -> ResponseStream:
        """Send a request whose response is a stream of lines."""
        index, connection = self._connect(self._preferred)
        try:
            connection.request("POST", path, msgspec.json.encode(request), self._headers())
            # Taken before the response owns the socket: `close` needs it in another thread.
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

    def _authenticate(self) -> None:
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
        """Connections to try: an idle one, which may have broken meanwhile, then a new one to every server in turn."""
        with self._guard:
            kept = self._idle.pop() if self._idle else None
            first = self._preferred
        if kept is not None:
            yield kept
        for offset in range(len(self.servers.endpoints)):
            yield self._connect(first + offset)

    def _connect(self, number: int) -> tuple[int, http.client.HTTPConnection]:
        """Connects with the first request."""
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
                    f"the response of {self.servers} to {path} is not one of etcd ({error}): {data[:80]!r}"
                ) from error
        failure = _failure(status, data)
        if failure.code in _RETRY_CODES:
            raise StoreUnreachable(f"etcd at {self.servers} cannot serve {path} now: {failure.error}")
        raise StoreRefused(f"etcd at {self.servers} refused {path}: {failure.error}")

    def _unreachable(self, error: Exception | None) -> LeaseError:
        """Temporary, unless the server's certificate is not the right one."""
        kind = StoreRefused if isinstance(error, ssl.SSLCertVerificationError) else StoreUnreachable
        return kind(f"no answer from etcd at {self.servers}: {error}")


class ResponseStream:
    """The lines of a streaming response. `close` may be called from another thread and ends the iteration."""

    def __init__(
        self, connection: http.client.HTTPConnection, sock: socket.socket, response: http.client.HTTPResponse
    ) -> None:
        self._connection, self._sock, self._response = connection, sock, response

    def __iter__(self) -> Iterator[Watched]:
        """Ends when the connection closes, or at a line that is not of a watch."""
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
        """Called by the thread that iterated."""
        self._response.close()
        self._connection.close()


def _failure(status: int, data: bytes) -> EtcdFailure:
    """The error of a response whose status is not 200."""
    if status == 200:
        return EtcdFailure("", 0)
    try:
        return decode(data, EtcdFailure)
    except msgspec.MsgspecError:
        return EtcdFailure(f"HTTP status {status}: {data[:80]!r}")


def _keep_alive(sock: socket.socket) -> None:
    """A stream may have no data for hours; keep-alive detects a lost server in about ten seconds."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

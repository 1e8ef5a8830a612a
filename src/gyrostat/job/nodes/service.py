"""The job's service between machines: gRPC, with `messages` in msgpack.

    /gyrostat.job.v1.Job/Attend    a stream each way, for as long as an agent follows the leader
    /gyrostat.job.v1.Job/Ask       a client's request, to any agent

A port that is not on loopback needs a token, the same for all agents and clients of a job: from $GYROSTAT_TOKEN or a file,
never from a command line. It is compared in constant time; a call without it is refused before its message is read. Messages
that are too large, malformed or unknown are refused with a status that says so. Only agents and clients import this module:
gRPC's threads cannot be forked.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.job.control.requests import Reply, Request
from gyrostat.job.nodes.messages import (
    LARGEST,
    SERVICE,
    Instruct,
    NodeAttending,
    Report,
    decode_instructs,
    decode_reply,
    decode_reports,
    decode_request,
    encode,
)
from gyrostat.job.processes.channel import ProtocolError

try:
    import grpc
except ModuleNotFoundError as error:
    raise UsageError("a job on several machines needs gRPC: pip install 'gyrostat[cluster]'") from error

_THREADS = 256
_OPTIONS = [
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
]
_STOP_S = 5.0
_TOGETHER = 1 << 18
"""Bytes after which no further message is added to a batch."""


class Unavailable(GyrostatError):
    """An agent did not answer."""


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class NodeSession:
    """An agent that follows this one. Messages to it wait in a queue."""

    def __init__(self, attending: NodeAttending) -> None:
        self.node, self.attending = attending.node, attending
        self.outgoing: queue.SimpleQueue[Instruct | None] = queue.SimpleQueue()

    def send(self, instruct: Instruct) -> None:
        self.outgoing.put(instruct)

    def close(self) -> None:
        """After all messages that were sent."""
        self.outgoing.put(None)


class ServiceHandler(Protocol):
    """Called by the service, from its threads."""

    def came(self, session: NodeSession) -> None: ...

    def reported(self, session: NodeSession, reports: list[Report]) -> None: ...

    def went(self, session: NodeSession) -> None: ...

    def asked(self, request: Request, reply: Future[Reply]) -> None: ...


class Service:
    """One agent's port."""

    def __init__(self, host: str, port: int, token: str | None, serves: ServiceHandler) -> None:
        if token is None and not is_loopback(host):
            raise UsageError(
                f"an agent that listens at {host} can be reached from other machines, so it needs a token: set GYROSTAT_TOKEN, "
                "or name a file with --token-file, the same on all nodes"
            )
        self._token, self._serves = token, serves
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="gyrostat-service")
        self._server = grpc.server(self._pool, options=_OPTIONS)
        handlers = {
            "Attend": grpc.stream_stream_rpc_method_handler(self._attend),
            "Ask": grpc.unary_unary_rpc_method_handler(self._ask),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self.port: int = self._server.add_insecure_port(_address(host, port))
        except RuntimeError as error:
            raise UsageError(
                f"cannot listen at {_address(host, port)}: {error}; name another --listen HOST:PORT"
            ) from error
        self.address = _address(host, self.port)
        self._server.start()

    def close(self) -> None:
        self._server.stop(_STOP_S).wait()
        self._pool.shutdown()

    def _attend(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self._check_token(context)
        first, *more = self._decoded(decode_reports, next(requests, b""), context) or [None]
        if not isinstance(first, NodeAttending):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be NodeAttending")
        session = NodeSession(first)
        self._serves.came(session)
        self._serves.reported(session, more)

        def listen() -> None:
            try:
                for data in requests:
                    self._serves.reported(session, decode_reports(data))
            except (grpc.RpcError, ProtocolError, ValueError):
                pass  # disconnected, or an unknown message: it has to connect again
            self._serves.went(session)
            session.close()

        threading.Thread(target=listen, name="gyrostat-attended", daemon=True).start()
        yield from _batches(session.outgoing)

    def _ask(self, data: bytes, context: Any) -> bytes:
        self._check_token(context)
        request = self._decoded(decode_request, data, context)
        reply: Future[Reply] = Future()
        context.add_callback(reply.cancel)  # the client has disconnected
        self._serves.asked(request, reply)
        return encode(reply.result())

    def _decoded(self, decode: Callable[[bytes], Any], data: bytes, context: Any) -> Any:
        try:
            return decode(data)
        except ProtocolError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _check_token(self, context: Any) -> None:
        if self._token is None:
            return
        given = dict(context.invocation_metadata()).get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")


class LeaderLink:
    """An agent's connection to its leader, from `NodeAttending` until one of them closes it. `obey` and `broke` are called
    from a separate thread."""

    def __init__(
        self,
        address: str,
        token: str | None,
        attending: NodeAttending,
        *,
        obey: Callable[[LeaderLink, list[Instruct]], None],
        broke: Callable[[LeaderLink, str], None],
    ) -> None:
        self.address = address
        self._outgoing: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._outgoing.put(attending)
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._obey, self._broke = obey, broke
        self._call = self._channel.stream_stream(f"/{SERVICE}/Attend")(
            self._reports(), metadata=_metadata(token)
        )
        self._thread = threading.Thread(target=self._listen, name="gyrostat-link", daemon=True)
        self._thread.start()

    def send(self, report: Report) -> None:
        self._outgoing.put(report)

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._thread.join()
        self._channel.close()

    def _reports(self) -> Iterator[bytes]:
        yield from _batches(self._outgoing)

    def _listen(self) -> None:
        why = "the leader closed the connection"
        try:
            for data in self._call:
                self._obey(self, decode_instructs(data))
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except ProtocolError as error:
            why = str(error)
        self._outgoing.put(None)
        self._broke(self, why)


class AgentClient:
    """Asks one agent. Raises `Unavailable` if it does not answer; with the same request id, another may be asked again."""

    def __init__(self, address: str, token: str | None) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._ask = self._channel.unary_unary(f"/{SERVICE}/Ask")
        self._address, self._metadata = address, _metadata(token)

    def ask(self, request: Request, timeout: float | None = None) -> Reply:
        try:
            return decode_reply(self._ask(encode(request), metadata=self._metadata, timeout=timeout))
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise UsageError(
                    f"the agent at {self._address} refuses: {error.details()}; set GYROSTAT_TOKEN to the job's"
                ) from None
            raise Unavailable(f"the agent at {self._address} did not answer ({code.name})") from None

    def close(self) -> None:
        self._channel.close()


def _batches(outgoing: queue.SimpleQueue[Any]) -> Iterator[bytes]:
    """What is waiting goes out together, until None comes: a call costs more than what it carries."""
    message: Any = ()
    while message is not None:
        batch: list[msgspec.Raw] = []
        size, message = 0, outgoing.get()
        while message is not None:
            batch.append(msgspec.Raw(encode(message)))
            size += len(batch[-1])
            if size >= _TOGETHER or outgoing.empty():
                break
            message = outgoing.get()
        if batch:
            yield encode(batch)


def _metadata(token: str | None) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")] if token is not None else []


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_host(towards: str) -> str:
    """The address by which this machine is reached from where `towards` (host:port) is."""
    host, _, port = towards.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), int(port)))
        except OSError as error:
            raise UsageError(
                f"no route to {towards} ({error}); name this node's address: --listen HOST"
            ) from error
        return str(probe.getsockname()[0])

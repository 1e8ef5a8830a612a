"""Serves the API: the address, whether it needs tokens, and uvicorn in a thread of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from gyrostat.cluster.api.app import build_app
from gyrostat.cluster.api.connections import BoundedConnection
from gyrostat.cluster.api.tokens import Principal, TokenFile
from gyrostat.core.errors import UsageError

if TYPE_CHECKING:
    from gyrostat.cluster.service import ClusterService

DEFAULT_LISTEN = "127.0.0.1:7460"
_KEEP_ALIVE_S = 30
_BACKLOG = 128


def parse_listen(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[::1]:PORT`, or a port of the loopback address."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not port.isascii() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise UsageError(f"--listen takes HOST:PORT, such as {DEFAULT_LISTEN}; got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def check_listen(address: str, tokens: Path | None) -> TokenFile | None:
    """Tokens are required on every address but loopback ones."""
    if tokens is not None:
        return TokenFile(tokens)
    if not ip_address(address).is_loopback:
        raise UsageError(
            f"{address} can be reached from other machines, so the cluster needs tokens: make some with `gyrostat token add`, "
            f"and give --tokens FILE; or listen at {DEFAULT_LISTEN}"
        )
    return None


class ApiServer:
    """The API of a cluster, listening at `address` (with the chosen port if 0 was requested)."""

    def __init__(
        self, service: ClusterService, listen: str = DEFAULT_LISTEN, tokens: Path | None = None
    ) -> None:
        """Raises `UsageError` if the address is not available, or needs tokens and there are none."""
        family, address = _resolve(*parse_listen(listen))
        token_file = check_listen(address[0], tokens)
        self._socket = _listen_at(family, address)
        bound = self._socket.getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
        config = uvicorn.Config(
            build_app(service, token_file=token_file, anonymous=Principal(tenant=_user(), operator=True)),
            http=BoundedConnection,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="api", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def requests(self) -> int:
        """How many are in progress."""
        return len(self._server.server_state.tasks)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Answer the requests in progress, then close."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()


@contextlib.contextmanager
def serving(
    service: ClusterService, listen: str = DEFAULT_LISTEN, tokens: Path | None = None
) -> Iterator[ApiServer]:
    """Serve the API during the block."""
    server = ApiServer(service, listen, tokens)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(
            f"--listen {host}:{port}: {host!r} is not an address of this machine: {error}"
        ) from error
    return family, address


def _listen_at(family: socket.AddressFamily, address: Any) -> socket.socket:
    # asyncio disables Nagle's algorithm only on sockets whose protocol is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen at {address[0]}:{address[1]}: {error.strerror}; if another cluster is there, choose another "
            "port: --listen HOST:PORT"
        ) from error
    return listener


def _user() -> str:
    """The tenant of jobs that are submitted without a token."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())

"""How the workers of one machine find and authenticate one another when a group is made.

1. Each worker opens a `PeerListener`; the kernel chooses its name.
2. The workers exchange their `PeerAddress`es, with a secret each, through gloo (`group.py`).
3. Each worker connects to those of lower rank and accepts those of higher rank, three links per pair (`connect`).
4. The workers tell one another through gloo whether that succeeded: all of them use shared memory, or none does.

A process of another user, and one that does not know the secret, is turned away.
"""

from __future__ import annotations

import os
import resource
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gyrostat.core.errors import PeerLost
from gyrostat.engine.environment import worker_environment
from gyrostat.engine.transport.peer_link import POLL_MS, PeerLink
from gyrostat.engine.transport.shared_memory import SharedMemoryTransport
from gyrostat.engine.transport.shared_region import RegionExchange, SharedRegion

ADDRESS_BYTES = 256
"""The length of an encoded `PeerAddress`."""
NO_ADDRESS = b"\0" * ADDRESS_BYTES
"""Sent by a worker that has no listener."""

_CONNECT_TIMEOUT_S = 5.0
"""Workers that could connect and have not by then all use gloo."""
_ENOUGH_FILES = 1 << 16
_CREDENTIALS = struct.Struct("3i")

_Links = list[dict[int, PeerLink]]
"""By purpose: the links to all other workers, by rank."""


class PeerAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker of this machine can be reached."""

    machine: str
    socket: bytes
    secret: bytes
    max_files: int
    """How many files the worker may have open."""

    def encode(self) -> bytes:
        data = msgspec.msgpack.encode(self)
        return (len(data).to_bytes(2, "little") + data).ljust(ADDRESS_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> PeerAddress:
        length = int.from_bytes(data[:2], "little")
        return msgspec.msgpack.decode(data[2 : 2 + length], type=cls)


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    purpose: int
    secret: bytes


class PeerListener:
    """Accepts the links of the other workers of a group."""

    def __init__(self, size: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")
        self._listener.listen(3 * size)
        self._listener.setblocking(False)
        self.address = PeerAddress(
            machine=_machine_id(),
            socket=bytes(self._listener.getsockname()),
            secret=secrets.token_bytes(16),
            max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def connect(
        self, rank: int, addresses: Sequence[PeerAddress], check_valid: Callable[[], None], timeout_s: float
    ) -> SharedMemoryTransport | None:
        """Links to all other workers; None if they are on several machines, or cannot connect."""
        links: _Links = [{}, {}, {}]
        if any(address.machine != self.address.machine for address in addresses):
            return None
        try:
            for other, address in enumerate(addresses[:rank]):
                for purpose, found in enumerate(links):
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    found[other] = PeerLink(sock, check_valid, timeout_s)
                    sock.connect(address.socket)
                    found[other].send(msgspec.msgpack.encode(_Hello(rank, purpose, address.secret)))
            deadline = time.monotonic() + min(_CONNECT_TIMEOUT_S, timeout_s / 4)
            while any(len(found) < len(addresses) - 1 for found in links):
                self._accept(links, check_valid, timeout_s, deadline)
        except (OSError, PeerLost):
            for link in (link for found in links for link in found.values()):
                link.close()
            check_valid()  # if another worker is lost, this or gloo raises
            return None
        control, gradients, buffers = links
        regions = {other: RegionExchange(link) for other, link in gradients.items()}
        max_files = min(address.max_files for address in addresses)
        return SharedMemoryTransport(rank, control, regions, buffers, max_files=max_files)

    def close(self) -> None:
        self._listener.close()

    def _accept(
        self, links: _Links, check_valid: Callable[[], None], timeout_s: float, deadline: float
    ) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        if not poll.poll(POLL_MS):
            check_valid()
            if time.monotonic() > deadline:
                raise TimeoutError
            return
        sock, _ = self._listener.accept()
        link = PeerLink(sock, check_valid, max(0.0, deadline - time.monotonic()))
        size = _CREDENTIALS.size
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user != os.getuid():
            link.close()
            return
        try:
            hello = msgspec.msgpack.decode(link.receive(), type=_Hello)
        except (PeerLost, msgspec.DecodeError):
            link.close()
            return
        if secrets.compare_digest(hello.secret, self.address.secret) and hello.purpose < len(links):
            link.timeout_s = timeout_s
            links[hello.purpose][hello.rank] = link
        else:
            link.close()


def open_listener(size: int) -> PeerListener | None:
    """None if this process cannot share memory, or was started with `GYROSTAT_SHARED_MEMORY=0`."""
    if not worker_environment().shared_memory or not _machine_id():
        return None
    try:
        SharedRegion(1)
        return PeerListener(size)
    except (OSError, RuntimeError, AttributeError):  # a sandbox may forbid such memory and such sockets
        return None


def allow_open_files() -> None:
    """Raise this process's soft limit of open files: each region that a peer shares is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(_ENOUGH_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _machine_id() -> str:
    """Equal for workers that can connect: one kernel, one network namespace, one user. Empty if it cannot be read."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return ""

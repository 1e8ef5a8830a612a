"""Workers on one machine talk through Unix sockets, and see one another's memory: much faster than gloo over loopback.

A group whose workers all live on one machine, in one network namespace and under one user, has `SharedMemoryTransport`; any
other talks by
gloo alone. They connect when the group is made, and all or none of them use it. There are three lines between any two
workers, for what must not wait for each other: `control` (exchanges), `gradients` (the courier's) and `buffers`. Whoever waits
looks up now and then, as in `group.py`; a line that ends means that the worker at its other end has gone.

A memory region (`Region`) is an unnamed file, handed over through a line when a neighbour first needs to look into it. So
nothing is left behind by a worker that is killed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from gyrostat.core.errors import GyrostatError, PeerLost

SWITCH = "GYROSTAT_SHARED_MEMORY"
"""Environment: `0` has workers of one machine talk by gloo, as those of several do."""
MOST_BYTES = 1 << 16
"""Of one message; longer ones go by gloo."""
PLACE_BYTES = 256

_LOOK_UP_MS = 20
_KNOCK_S = 5.0
"""For which neighbours that could reach one another may take to do so; then all do without."""
_MOST_RANKS = 4096
"""Virtual workers whose places fit into one message."""
_DO_NOT_FORK = 10  # of madvise(2)
_ENOUGH_FILES = 1 << 16
_FILES_AT_ONCE = 64
_CREDENTIALS = struct.Struct("3i")


class PeerLink:
    """One connection, used by one thread at a time. Messages arrive whole, and in order."""

    def __init__(self, sock: socket.socket, look_up: Callable[[], None], timeout_s: float) -> None:
        """`look_up` raises if nobody should wait any longer."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST_BYTES)
        self._sock, self._look_up, self.timeout_s = sock, look_up, timeout_s
        _lines.add(self)

    def send(self, message: bytes, files: Sequence[int] = ()) -> None:
        """Not empty: that would look like the end."""
        until: float | None = None
        while True:
            try:
                if files:
                    socket.send_fds(self._sock, [message], files)
                else:
                    self._sock.send(message)
                return
            except BlockingIOError:
                until = self._wait(select.POLLOUT, until)
            except OSError as error:
                raise _lost(error) from error

    def receive(self) -> bytes:
        return self.receive_with_files(0)[0]

    def receive_with_files(self, most: int) -> tuple[bytes, list[int]]:
        """The files are the caller's to close."""
        until: float | None = None
        reset = False
        while True:
            try:
                message, files, flags, _ = socket.recv_fds(self._sock, MOST_BYTES, most)
            except BlockingIOError:
                until = self._wait(select.POLLIN, until)
            except ConnectionResetError as error:  # told before what it had sent; then once more, or the end
                if reset:
                    raise _lost(error) from error
                reset = True
            except OSError as error:
                raise _lost(error) from error
            else:
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    for file in files:
                        os.close(file)
                    raise GyrostatError(
                        "a neighbour's message did not fit; are there too many open files? See ulimit -n"
                    )
                if not message:
                    raise _lost("its connection has ended")
                return message, files

    def close(self) -> None:
        self._sock.close()

    def _wait(self, event: int, until: float | None) -> float:
        until = until or time.monotonic() + self.timeout_s
        poll = select.poll()
        poll.register(self._sock, event)
        while not poll.poll(_LOOK_UP_MS):
            self._look_up()
            if time.monotonic() > until:
                raise _lost(f"nothing was heard for {self.timeout_s:g} s")
        return until


def _lost(why: object) -> PeerLost:
    return PeerLost(f"lost another worker of this machine: {why}")


_lines: weakref.WeakSet[PeerLink] = weakref.WeakSet()


# Memory.

_serials = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()


class Region:
    """Memory of this worker's that its neighbours can look into. It lasts for as long as anybody holds or sees it."""

    def __init__(self, size: int) -> None:
        self.serial = next(_serials)
        self.file = os.memfd_create("gyrostat-gradients")
        os.ftruncate(self.file, size)
        self._closing = weakref.finalize(self, os.close, self.file)
        self._closing.atexit = False
        self.memory = _mapped(self.file)
        _alive[self.serial] = self

    def let_go(self) -> None:
        """In a process that was forked from this worker's, and has nothing to do with its memory."""
        self._closing()


def _mapped(file: int) -> torch.Tensor:
    size = os.fstat(file).st_size
    memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
    # Data workers are forks of this process: they would keep what it has long given back.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), _DO_NOT_FORK)
    return memory


def _forked() -> None:
    """In a fork: nobody may take it for this worker because it has the other end of a line."""
    for line in _lines:
        line.close()
    for region in list(_alive.values()):
        region.let_go()


os.register_at_fork(after_in_child=_forked)


class RegionOffer(msgspec.Struct, frozen=True, array_like=True):
    """Regions that the receiver has not seen yet, whose files come along; and those that it can forget."""

    serials: list[int]
    gone: list[int]


class _View:
    """What this worker sees of one neighbour's memory, and has shown it of its own. For the courier."""

    def __init__(self, line: PeerLink) -> None:
        self.line = line
        self._shown: set[int] = set()
        self._seen: dict[int, torch.Tensor] = {}

    def show(self, regions: Iterable[Region]) -> None:
        new = [region for region in regions if region.serial not in self._shown]
        gone = [serial for serial in self._shown if serial not in _alive]
        self._shown.difference_update(gone)
        self._shown.update(region.serial for region in new)
        for start in range(0, len(new), _FILES_AT_ONCE) or (range(1) if gone else ()):
            some, gone_now = new[start : start + _FILES_AT_ONCE], gone if start == 0 else []
            message = msgspec.msgpack.encode(RegionOffer([region.serial for region in some], gone_now))
            self.line.send(b"o" + message, [region.file for region in some])

    def hear(self) -> bytes:
        """The next message that is not about memory."""
        while True:
            message, files = self.line.receive_with_files(_FILES_AT_ONCE)
            if message[:1] != b"o":
                return message[1:]
            offer = msgspec.msgpack.decode(message[1:], type=RegionOffer)
            for serial in offer.gone:
                self._seen.pop(serial, None)
            for serial, file in zip(offer.serials, files, strict=True):
                self._seen[serial] = _mapped(file)
                os.close(file)

    def say(self, message: bytes) -> None:
        self.line.send(b"m" + message)

    def memory(self, serial: int) -> torch.Tensor:
        return self._seen[serial]

    def close(self) -> None:
        self.line.close()
        self._seen.clear()


# Finding one another.


class PeerAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker lives and can be reached."""

    machine: str
    address: bytes
    secret: bytes
    files: int
    """How many it may have open."""

    def encode(self) -> bytes:
        data = msgspec.msgpack.encode(self)
        return (len(data).to_bytes(2, "little") + data).ljust(PLACE_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> PeerAddress:
        length = int.from_bytes(data[:2], "little")
        return msgspec.msgpack.decode(data[2 : 2 + length], type=cls)


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    purpose: int
    secret: bytes


class PeerListener:
    """Where the others of a group knock. Its name is the kernel's choice, and its secret is told through the group."""

    def __init__(self, size: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")
        self._listener.listen(3 * size)
        self._listener.setblocking(False)
        self.place = PeerAddress(
            machine=_this_machine(),
            address=bytes(self._listener.getsockname()),
            secret=secrets.token_bytes(16),
            files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def connect(
        self, rank: int, places: Sequence[PeerAddress], look_up: Callable[[], None], timeout_s: float
    ) -> SharedMemoryTransport | None:
        """Lines to all others: to those before this one, and from those after it. None: it cannot be done."""
        lines: list[dict[int, PeerLink]] = [{}, {}, {}]
        if any(place.machine != self.place.machine for place in places):
            return None
        try:
            for other, place in enumerate(places[:rank]):
                for purpose, found in enumerate(lines):
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    found[other] = PeerLink(sock, look_up, timeout_s)
                    sock.connect(place.address)
                    found[other].send(msgspec.msgpack.encode(_Hello(rank, purpose, place.secret)))
            until = time.monotonic() + min(_KNOCK_S, timeout_s / 4)
            while any(len(found) < len(places) - 1 for found in lines):
                self._admit(lines, look_up, timeout_s, until)
        except (OSError, PeerLost):
            for line in (line for found in lines for line in found.values()):
                line.close()
            look_up()  # if another worker is lost, gloo or this says so
            return None
        control, gradients, buffers = lines
        views = {other: _View(line) for other, line in gradients.items()}
        return SharedMemoryTransport(
            rank, control, views, buffers, files=min(place.files for place in places)
        )

    def close(self) -> None:
        self._listener.close()

    def _admit(
        self, lines: list[dict[int, PeerLink]], look_up: Callable[[], None], timeout_s: float, until: float
    ) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        if not poll.poll(_LOOK_UP_MS):
            look_up()
            if time.monotonic() > until:
                raise TimeoutError
            return
        sock, _ = self._listener.accept()
        line = PeerLink(sock, look_up, max(0.0, until - time.monotonic()))
        size = _CREDENTIALS.size
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user != os.getuid():
            line.close()
            return
        try:
            hello = msgspec.msgpack.decode(line.receive(), type=_Hello)
        except (PeerLost, msgspec.DecodeError):
            line.close()
            return
        if secrets.compare_digest(hello.secret, self.place.secret) and hello.purpose < len(lines):
            line.timeout_s = timeout_s
            lines[hello.purpose][hello.rank] = line
        else:
            line.close()


def _this_machine() -> str:
    """The same for workers that can reach one another: one kernel, one network namespace, one user; else empty."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return ""


def allow_open_files() -> None:
    """As many as this worker may have without asking anybody, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(_ENOUGH_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def open_listener(size: int) -> PeerListener | None:
    """None: this worker cannot have neighbours, or is not meant to."""
    if os.environ.get(SWITCH, "1") == "0" or not _this_machine():
        return None
    try:
        Region(1)
        return PeerListener(size)
    except (
        OSError,
        RuntimeError,
        AttributeError,
    ):  # not everywhere may one have such memory and such sockets
        return None


@dataclass
class SharedMemoryTransport:
    """All other workers of the group, from this one's side."""

    rank: int
    control: dict[int, PeerLink]
    views: dict[int, _View]
    """For the courier."""
    buffers: dict[int, PeerLink]
    files: int
    """How many the one with the fewest may have open."""
    _given_up: bool = False

    def can_see(self, ranks: int) -> bool:
        """Whether there may be enough open files for all to show the gradients of so many virtual workers to all others."""
        workers = len(self.views) + 1
        return ranks <= _MOST_RANKS and (ranks + 2 * workers) * workers <= self.files // 4

    def gather(self, message: bytes) -> Callable[[], list[bytes]]:
        """Everybody's message, in worker order; at most `MOST_BYTES` each. What is returned waits for the others."""
        for line in self.control.values():
            line.send(message)

        def wait() -> list[bytes]:
            heard = {other: line.receive() for other, line in self.control.items()}
            return [message if worker == self.rank else heard[worker] for worker in range(len(heard) + 1)]

        return wait

    def broadcast(self, tensor: torch.Tensor, source: int) -> Callable[[], None]:
        """Fill `tensor`, of at most `MOST_BYTES`, with that of worker `source`. Call what is returned to wait for it."""
        row = tensor.view(torch.uint8).numpy()
        if source == self.rank:
            message = row.tobytes()
            for line in self.buffers.values():
                line.send(message)
            return lambda: None

        def wait() -> None:
            row[:] = memoryview(self.buffers[source].receive())

        return wait

    def show(self, regions: Sequence[Region], message: bytes) -> dict[int, bytes]:
        """(The courier) let all others look into these, and tell them something. Returns what each of them has told."""
        if self._given_up:  # the others must not take what comes after for what did not come
            raise _lost("an earlier bucket was given up")
        self._given_up = True
        for view in self.views.values():
            view.show(regions)
            view.say(message)
        heard = {other: view.hear() for other, view in self.views.items()}
        self._given_up = False
        return heard

    def memory(self, worker: int, serial: int) -> torch.Tensor:
        """(The courier) a region that a neighbour has shown."""
        return self.views[worker].memory(serial)

    def close(self) -> None:
        for line in (*self.control.values(), *self.buffers.values()):
            line.close()
        for view in self.views.values():
            view.close()

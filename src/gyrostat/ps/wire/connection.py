"""A socket in a selector: frames in, frames out, and it never blocks.

The owner's loop calls `key.data()` for every key that its selector returns; everything else happens in the callbacks `on_frame`
and `on_lost`. What cannot be sent at once waits. The accepting end reads nothing more from a connection until it is sent, so a
peer that does not read its replies cannot make this process collect them; the connecting end always reads, so that the two
never wait for one another. A malformed frame closes the connection, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from gyrostat.core.errors import GyrostatError
from gyrostat.ps.wire import handshake
from gyrostat.ps.wire.frames import MOST_NUMBERS, FrameKind, FrameReader, MalformedFrame, PsFrame, frame_parts
from gyrostat.ps.wire.handshake import Challenge, PeerHello, PeerIdentity, PeerWelcome

logger = logging.getLogger(__name__)

_MOST_PARTS = 512
"""Per call of sendmsg; the kernel allows 1024."""
MOST_ARRAYS = 64 << 30
_MOST_STRANGERS = 64
"""Connections whose other end has not proved that it knows the token; the oldest are closed."""
_READ_AT_ONCE = 16
"""Frames that are taken from one connection before others have their turn."""

T = TypeVar("T", bound=msgspec.Struct)


class ConnectionState(StrEnum):
    CONNECTING = "connecting"
    CHALLENGED = "challenged"
    """The accepting end has sent its challenge, or the connecting end its answer."""
    OPEN = "open"
    CLOSED = "closed"


class PsConnection:
    """One connection. `peer`: who is at the other end, once it is open (None for the connecting end)."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        token: bytes,
        *,
        identity: PeerIdentity | None,
        on_frame: Callable[[PsConnection, PsFrame], None],
        on_lost: Callable[[PsConnection, str], None],
    ) -> None:
        """`identity`: of the connecting end; None: this is the accepting end."""
        self.peer: PeerIdentity | None = None
        self.state = ConnectionState.CONNECTING
        self._selector, self._socket, self._token, self._identity = selector, sock, token, identity
        self._on_frame, self._on_lost = on_frame, on_lost
        self._reader = FrameReader(0, handshake.MOST_BYTES)
        self._unsent: deque[memoryview] = deque()
        self._held: list[memoryview] = []
        """Frames of the connecting end that wait for the handshake."""
        self._challenge: Challenge | None = None
        self._hello: PeerHello | None = None
        self._events = selectors.EVENT_READ
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(sock, self._events, self._ready)
        if identity is None:
            self._challenge = handshake.new_challenge()
            self.state = ConnectionState.CHALLENGED
            self._send_now(frame_parts(FrameKind.CHALLENGE, msgspec.msgpack.encode(self._challenge)))

    @property
    def closed(self) -> bool:
        return self.state is ConnectionState.CLOSED

    @property
    def busy(self) -> bool:
        """Something has not been sent yet."""
        return bool(self._unsent or self._held)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: FrameKind, numbers: bytes, arrays: Sequence[memoryview] = ()) -> None:
        """Send a frame, now or as soon as possible. The arrays must not be changed until then."""
        parts = frame_parts(kind, numbers, arrays)
        if self.state is ConnectionState.OPEN:
            self._send_now(parts)
        elif self.state is not ConnectionState.CLOSED:
            self._held += parts

    def close(self) -> None:
        """Without a call of `on_lost`."""
        if self.state is not ConnectionState.CLOSED:
            self.state = ConnectionState.CLOSED
            self._selector.unregister(self._socket)
            self._socket.close()
            self._unsent.clear()
            self._held.clear()

    # Events.

    def _ready(self) -> None:
        try:
            if self._unsent:
                self._flush()
            for _ in range(_READ_AT_ONCE):
                if self.closed or (self._unsent and self._identity is None):
                    return
                frame = self._reader.receive(self._socket)
                if frame is None:
                    return
                self._take(frame)
        except EOFError:
            self._lost("the connection was closed by the other end")
        except OSError as error:
            self._lost(f"the connection broke: {error.strerror or error}")
        except (GyrostatError, msgspec.DecodeError, UnicodeDecodeError) as error:
            who = f" of {self.peer.role} {self.peer.name!r}" if self.peer else ""
            logger.warning("a connection%s is closed: %s", who, error)
            self._lost(f"a malformed frame: {error}")

    def _take(self, frame: PsFrame) -> None:
        if self.state is ConnectionState.OPEN:
            self._on_frame(self, frame)
        elif self._identity is None:
            self._accept(frame)
        else:
            self._connect(frame, self._identity)

    def _accept(self, frame: PsFrame) -> None:
        assert self._challenge is not None
        answer = _decode(frame, FrameKind.HELLO, PeerHello)
        reply = handshake.welcome(self._token, self._challenge, answer)
        self.peer = answer.peer
        self._open()
        self._send_now(frame_parts(FrameKind.WELCOME, msgspec.msgpack.encode(reply)))

    def _connect(self, frame: PsFrame, identity: PeerIdentity) -> None:
        if self._challenge is None:
            self._challenge = _decode(frame, FrameKind.CHALLENGE, Challenge)
            self._hello = handshake.hello(self._token, identity, self._challenge)
            self.state = ConnectionState.CHALLENGED
            self._send_now(frame_parts(FrameKind.HELLO, msgspec.msgpack.encode(self._hello)))
            return
        assert self._hello is not None
        answer = _decode(frame, FrameKind.WELCOME, PeerWelcome)
        handshake.check_welcome(self._token, self._challenge, self._hello, answer)
        self._open()
        held, self._held = self._held, []
        self._send_now(held)

    def _open(self) -> None:
        self.state = ConnectionState.OPEN
        self._reader.most_arrays, self._reader.most_numbers = MOST_ARRAYS, MOST_NUMBERS

    def _send_now(self, parts: list[memoryview]) -> None:
        self._unsent.extend(parts)
        if len(self._unsent) == len(parts):
            try:
                self._flush()
            except OSError:
                self._watch()  # the selector reports it: nobody expects `on_lost` within `send`

    def _flush(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                some = [unsent[place] for place in range(min(len(unsent), _MOST_PARTS))]
                count = self._socket.sendmsg(some)
                while unsent and count >= unsent[0].nbytes:
                    count -= unsent.popleft().nbytes
                if count:
                    unsent[0] = unsent[0].cast("B")[count:]
        except (BlockingIOError, InterruptedError):
            pass
        self._watch()

    def _watch(self) -> None:
        """While something is unsent, the accepting end reads nothing."""
        events = selectors.EVENT_READ
        if self._unsent:
            events = selectors.EVENT_WRITE if self._identity is None else events | selectors.EVENT_WRITE
        if events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._ready)

    def _lost(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_lost(self, reason)


def connect(
    selector: selectors.BaseSelector,
    address: tuple[str, int],
    token: bytes,
    identity: PeerIdentity,
    *,
    on_frame: Callable[[PsConnection, PsFrame], None],
    on_lost: Callable[[PsConnection, str], None],
) -> PsConnection:
    """Begin a connection. What is sent before it is open waits; `on_lost` is called if it cannot be opened."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            sock.connect(address)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                sock.close()
                raise
    return PsConnection(selector, sock, token, identity=identity, on_frame=on_frame, on_lost=on_lost)


class PsListener:
    """A listening socket on a free port, and the connections that it accepts."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        host: str,
        token: bytes,
        *,
        on_frame: Callable[[PsConnection, PsFrame], None],
        on_lost: Callable[[PsConnection, str], None],
    ) -> None:
        self._selector, self._token, self._on_frame, self._on_lost = selector, token, on_frame, on_lost
        self._socket = socket.create_server((host, 0), backlog=128)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._connections: dict[PsConnection, None] = {}
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        made = PsConnection(
            self._selector, sock, self._token, identity=None, on_frame=self._on_frame, on_lost=self._gone
        )
        self._connections[made] = None
        strangers = [each for each in self._connections if each.state is not ConnectionState.OPEN]
        for stranger in strangers[:-_MOST_STRANGERS]:
            stranger.close()
            del self._connections[stranger]

    def _gone(self, connection: PsConnection, reason: str) -> None:
        self._connections.pop(connection, None)
        if connection.peer is not None:
            self._on_lost(connection, reason)

    def close(self) -> None:
        self._selector.unregister(self._socket)
        self._socket.close()
        for connection in self._connections:
            connection.close()
        self._connections.clear()


def _decode(frame: PsFrame, kind: FrameKind, type_: type[T]) -> T:
    if frame.kind is not kind:
        raise MalformedFrame(f"a {frame.kind.name} frame where {kind.name} is expected")
    return msgspec.msgpack.decode(frame.numbers, type=type_)

"""Frames and channels: how the messages of `protocol` travel over a Unix socket.

A frame is a length (4 bytes, big endian) and one message in msgpack. A frame may carry open files beside it (SCM_RIGHTS): a
worker receives its pipes this way. The first message in both directions is a Hello with the sender's protocol version. No
pickle.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from gyrostat.core.errors import GyrostatError
from gyrostat.job.processes.protocol import VERSION, Hello

MAX_FRAME = 16 << 20
_HEADER = 4
_MAX_FDS = 16

Message = TypeVar("Message", bound=msgspec.Struct)


class ProtocolError(GyrostatError):
    """The bytes on a socket are not a message of this protocol."""


_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """The message as bytes: header and body."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME}"
        )
    return len(body).to_bytes(_HEADER, "big") + body


class Frames(Generic[Message]):
    """Reassembles messages from the pieces that a socket delivers."""

    def __init__(self, expected: object) -> None:
        """`expected` is the union of message types that may arrive."""
        self._decoder = msgspec.msgpack.Decoder(type=expected)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes. The rest is kept until more data arrives."""
        self._pending += data
        while len(self._pending) >= _HEADER:
            size = int.from_bytes(self._pending[:_HEADER], "big")
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame announces {size} bytes, over the limit of {MAX_FRAME}")
            if len(self._pending) < _HEADER + size:
                return
            body = bytes(self._pending[_HEADER : _HEADER + size])
            del self._pending[: _HEADER + size]
            try:
                yield self._decoder.decode(body)
            except (msgspec.DecodeError, GyrostatError) as error:
                raise ProtocolError(f"a frame of {size} bytes is not a known message: {error}") from error


class Channel(Generic[Message]):
    """One end of a socket for messages and the open files that they carry."""

    def __init__(self, sock: socket.socket, expected: object) -> None:
        self._socket = sock
        self._frames: Frames[Message] = Frames(expected)
        self.files: list[int] = []
        """Received files that were not yet taken; whoever takes them closes them."""
        self.closed = False
        """The other end has closed, and everything it sent has been read."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, files: Sequence[int] = ()) -> None:
        """Send one message; blocks while the other end does not read."""
        data = frame(message)
        sent = socket.send_fds(self._socket, [data], list(files)) if files else 0
        self._socket.sendall(data[sent:])

    def receive(self, *, wait: bool = True) -> list[Message] | None:
        """The messages that one read completes, possibly none; None when the other end has closed."""
        how = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:  # socket.recv_fds ignores its flags
            data, beside, flags, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_MAX_FDS * 4), how)
        except ConnectionResetError:
            return None
        for level, kind, files in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.files += array.array("i", files[: len(files) - len(files) % 4])
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"one message carried more than {_MAX_FDS} files")
        return list(self._frames.feed(data)) if data else None

    def drain(self) -> Iterator[Message]:
        """All messages sent so far, without waiting. Afterwards `closed` is set if no more can arrive."""
        with contextlib.suppress(BlockingIOError):
            while (messages := self.receive(wait=False)) is not None:
                yield from messages
            self.closed = True

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files.clear()
        self._socket.close()


def greet(channel: Channel[Message]) -> None:
    """Send Hello with this side's version."""
    channel.send(Hello(VERSION, os.getpid()))


def check_greeting(message: object) -> Hello:
    """The other end's first message must be a Hello of our version."""
    if not isinstance(message, Hello):
        raise ProtocolError(f"expected a Hello first, got {type(message).__name__}")
    if message.version != VERSION:
        raise ProtocolError(
            f"the other end uses version {message.version} of the protocol, this one {VERSION}; restart both with the same "
            "version of gyrostat"
        )
    return message

"""One connection between two workers of a machine: a Unix socket that carries whole messages and file descriptors.

`peer_listener.py` makes the connections, `shared_memory.py` uses them. A connection that ends means that the process at its
other end has gone, so a fork of this process must not keep it open: data workers close their copies at once.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Sequence

from gyrostat.core.errors import GyrostatError, PeerLost

MAX_MESSAGE_BYTES = 1 << 16
"""Longer messages go through gloo."""
POLL_MS = 20
"""How often a thread that waits checks whether its generation is still valid."""


class PeerLink:
    """One connection, used by one thread at a time. Messages arrive whole and in order."""

    def __init__(self, sock: socket.socket, check_valid: Callable[[], None], timeout_s: float) -> None:
        """`check_valid` raises if the generation has ended; it is called while this link waits."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE_BYTES)
        self._sock, self._check_valid, self.timeout_s = sock, check_valid, timeout_s
        _open_links.add(self)

    def send(self, message: bytes, files: Sequence[int] = ()) -> None:
        """Send a message that is not empty: an empty one would look like the end of the connection."""
        deadline: float | None = None
        while True:
            try:
                if files:
                    socket.send_fds(self._sock, [message], files)
                else:
                    self._sock.send(message)
                return
            except BlockingIOError:
                deadline = self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise peer_lost(error) from error

    def receive(self) -> bytes:
        """The next message; it brings no files."""
        return self.receive_with_files(0)[0]

    def receive_with_files(self, max_files: int) -> tuple[bytes, list[int]]:
        """The next message with its file descriptors, which the caller closes."""
        deadline: float | None = None
        reset = False
        while True:
            try:
                message, files, flags, _ = socket.recv_fds(self._sock, MAX_MESSAGE_BYTES, max_files)
            except BlockingIOError:
                deadline = self._wait(select.POLLIN, deadline)
            except ConnectionResetError as error:
                # The kernel reports the reset before messages that the peer sent earlier: read again once.
                if reset:
                    raise peer_lost(error) from error
                reset = True
            except OSError as error:
                raise peer_lost(error) from error
            else:
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    for file in files:
                        os.close(file)
                    raise GyrostatError(
                        f"a message of another worker with up to {max_files} file descriptors was cut off: this process has "
                        "too many open files; raise the limit (ulimit -n)"
                    )
                if not message:
                    raise peer_lost("its connection has ended")
                return message, files

    def close(self) -> None:
        self._sock.close()

    def _wait(self, event: int, deadline: float | None) -> float:
        deadline = deadline or time.monotonic() + self.timeout_s
        poll = select.poll()
        poll.register(self._sock, event)
        while not poll.poll(POLL_MS):
            self._check_valid()
            if time.monotonic() > deadline:
                raise peer_lost(f"it sent nothing for {self.timeout_s:g} s")
        return deadline


def peer_lost(reason: object) -> PeerLost:
    return PeerLost(f"lost another worker of this machine: {reason}")


_open_links: weakref.WeakSet[PeerLink] = weakref.WeakSet()


def _close_in_fork() -> None:
    for link in _open_links:
        link.close()


os.register_at_fork(after_in_child=_close_in_fork)

"""Connections of the API: limits on idle ones, and time limits for requests and answers.

A connection is idle while no request on it is in progress: before its first header is complete, and between requests. If
there are too many connections, of one address or of all, the oldest idle one is closed: one that never had a request before
one that had, then of the address that has most of them. So any number of silent connections keeps no client out: a client that
sends its request at once is not idle. A request has to be complete in time, and an answer has to be read in time. Requests are
not pipelined: a connection on which more are sent ahead of the answer is closed after that.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

MAX_CONNECTIONS = 512
MAX_OF_ADDRESS = 384
REQUEST_S = 10.0
"""A connection that takes longer for the header of a request is closed."""


class BoundedConnection(H11Protocol):
    """uvicorn's own timeout of an idle connection starts anew with every byte, and it waits for its answers to be read."""

    _answered: RequestResponseCycle | None = None
    """The last request that was answered; None: none yet."""
    _idle_since = 0.0
    _leaves = False
    """It was closed to make room."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._make_room()
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        begun: RequestResponseCycle | None = self.cycle
        if begun is not None and begun.response_complete and begun is not self._answered:
            self._await_request()

    def on_response_complete(self) -> None:
        """A client that has sent further requests before it got this answer is not served on this connection any more: 20
        requests on each of 300 connections would keep the event loop from others for seconds."""
        self._idle_since = self.loop.time()
        if self.conn.trailing_data[0]:
            self.transport.close()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came since the last answer. If that was not even read, the rest of it is dropped."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    @property
    def _address(self) -> str:
        return "" if self.client is None else self.client[0]

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _make_room(self) -> None:
        """Close the oldest idle connection if there are too many; this one, if none is idle."""
        present = [
            each for each in self.connections if isinstance(each, BoundedConnection) and not each._leaves
        ]
        own = [each for each in present if each._address == self._address]
        if len(own) > MAX_OF_ADDRESS:
            crowd = own
        elif len(present) > MAX_CONNECTIONS:
            crowd = present
        else:
            return
        idle = [each for each in crowd if each._is_idle and each is not self]
        held = Counter(each._address for each in idle)
        gone = min(
            idle,
            key=lambda each: (each.cycle is not None, -held[each._address], each._idle_since),
            default=self,
        )
        gone._leaves = True
        gone.transport.abort()

    def _await_request(self) -> None:
        self._answered = self.cycle
        self.loop.call_later(REQUEST_S, self._close_if_idle, self.cycle)

    def _close_if_idle(self, answered: RequestResponseCycle | None) -> None:
        if self.cycle is answered:
            self.transport.abort() if self.transport.get_write_buffer_size() else self.transport.close()

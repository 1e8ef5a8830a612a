"""Requests of clients that an agent has passed on to the leader and that have no reply yet. A new leader gets them again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from gyrostat.job.control.replies import Requester
from gyrostat.job.control.requests import Reply, Request, RequestResult
from gyrostat.job.nodes.messages import ForwardedRequest


class PendingRequests:
    def __init__(self, answer_within: float, now: float) -> None:
        """`answer_within`: seconds for which a request waits for a leader."""
        self._answer_within, self._led_at = answer_within, now
        self._pending: dict[int, tuple[Request, Requester]] = {}
        self._last = 0

    def add(self, request: Request, requester: Requester) -> ForwardedRequest:
        """The message to the leader."""
        self._last += 1
        self._pending[self._last] = request, requester
        return ForwardedRequest(self._last, request)

    def tick(self, has_leader: bool, why_not: str, now: float) -> None:
        """While a leader is being replaced, requests wait for the next one; if none comes in time, they are refused."""
        if has_leader:
            self._led_at = now
        elif now >= self._led_at + self._answer_within:
            text = f"the job has no leader at the moment ({why_not}); its workers train on: retry"
            for number in list(self._pending):
                self.answer(number, RequestResult(False, text, retryable=True))

    def deadline(self) -> float | None:
        """When to call `tick` if nothing happens."""
        return self._led_at + self._answer_within if self._pending else None

    def answer(self, number: int, reply: Reply) -> None:
        """The leader's reply. Nothing happens if the request is answered already."""
        if number in self._pending:
            self._pending.pop(number)[1].answer(reply)

    def messages(self) -> Iterator[ForwardedRequest]:
        """All that are not answered, for a new leader."""
        for number, (request, _) in list(self._pending.items()):
            yield ForwardedRequest(number, request)


@dataclass(frozen=True)
class ServiceRequester:
    """A client of the service."""

    reply: Future[Reply]

    def answer(self, reply: Reply) -> None:
        if not self.reply.cancelled():
            with contextlib.suppress(Exception):  # cancelled in this very moment
                self.reply.set_result(reply)


class SignalRequester:
    """A signal, which cannot be answered."""

    def answer(self, reply: Reply) -> None:
        pass

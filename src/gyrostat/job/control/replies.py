"""Replies to requests that change the job. Each has an id: sent twice, it is carried out once and answered twice, also long
after it was done and by the next leader, because replies are part of the leader's record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from gyrostat.job.control.requests import ProfileTable, Reply, RequestResult

Result = RequestResult | ProfileTable
_encode = msgspec.msgpack.Encoder().encode

_REMEMBERED = 256
_REMEMBERED_BYTES = 1 << 18
"""They are part of the leader's record, which a lease store must accept."""


class Requester(Protocol):
    """A client that waits for a reply, on this machine or another."""

    def answer(self, reply: Reply) -> None: ...


class IdempotentReplies:
    def __init__(self) -> None:
        self.answered: dict[str, Result] = {}
        self._sizes: dict[str, int] = {}
        self._waiting: dict[str, list[Requester]] = {}

    def restore(self, answered: Mapping[str, Result]) -> None:
        """The replies of the previous leader."""
        self.answered, self._sizes = {}, {}
        for request, answer in answered.items():
            self.note(request, answer)

    def is_new(self, request: str, requester: Requester) -> bool:
        """Whether to carry the request out. If it was sent before, it gets the same reply."""
        if request in self.answered:
            requester.answer(self.answered[request])
            return False
        waiting = self._waiting.setdefault(request, [])
        waiting.append(requester)
        return len(waiting) == 1

    def under_way(self, request: str) -> None:
        """The request is being carried out, though no client waits for it here yet."""
        self._waiting.setdefault(request, [_NOBODY])

    def note(self, request: str | None, answer: Result) -> None:
        """Remember the reply to a request. A retryable refusal is not remembered: the request may be sent again."""
        if request is None or (isinstance(answer, RequestResult) and answer.retryable):
            return
        self.answered[request], self._sizes[request] = answer, len(_encode(answer))
        while len(self.answered) > _REMEMBERED or (
            len(self.answered) > 1 and sum(self._sizes.values()) > _REMEMBERED_BYTES
        ):
            oldest = next(iter(self.answered))
            del self.answered[oldest], self._sizes[oldest]

    def answer(self, request: str | None, answer: Result) -> None:
        """Send the reply to all that wait for it. None: the job's own change, for which no client waits."""
        if request is None:
            return
        self.note(request, answer)
        for requester in self._waiting.pop(request, []):
            requester.answer(answer)

    def close(self, why: str) -> None:
        """Answer all that still wait."""
        for request in list(self._waiting):
            self.answer(request, RequestResult(False, why))


class _Nobody:
    def answer(self, reply: Reply) -> None:
        pass


_NOBODY = _Nobody()

"""Who waits for which answer. A request that changes something has an id: asked twice, it is carried out once and answered
twice, also long after it was done, and also by the next leader, for what was answered is part of the leader's record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gyrostat.job.control.control_socket import ProfileTable, Reply, RequestResult

Result = RequestResult | ProfileTable

_REMEMBERED = 256


class Requester(Protocol):
    """Whoever asked, however far away."""

    def answer(self, reply: Reply) -> None: ...


class IdempotentReplies:
    def __init__(self, answered: Mapping[str, Result] | None = None) -> None:
        self.answered: dict[str, Result] = dict(answered or {})
        self._waiting: dict[str, list[Requester]] = {}

    def is_new(self, request: str, asker: Requester) -> bool:
        """Whether to carry the request out. If it was asked before, its answer is, or will be, the same."""
        if request in self.answered:
            asker.answer(self.answered[request])
            return False
        waiting = self._waiting.setdefault(request, [])
        waiting.append(asker)
        return len(waiting) == 1

    def under_way(self, request: str) -> None:
        """It is being carried out, though nobody here waits for it yet."""
        self._waiting.setdefault(request, [_NOBODY])

    def note(self, request: str | None, answer: Result) -> None:
        """What came of a request, to be remembered. "Busy" is no outcome: who asks again is heard again."""
        if request is None or (isinstance(answer, RequestResult) and answer.retryable):
            return
        self.answered[request] = answer
        while len(self.answered) > _REMEMBERED:
            self.answered.pop(next(iter(self.answered)))

    def answer(self, request: str | None, answer: Result) -> None:
        """Tell those who wait for it; of a schedule's wishes nobody is told."""
        if request is None:
            return
        self.note(request, answer)
        for asker in self._waiting.pop(request, []):
            asker.answer(answer)

    def close(self, why: str) -> None:
        """Nobody is left waiting."""
        for request in list(self._waiting):
            self.answer(request, RequestResult(False, why))


class _Nobody:
    def answer(self, reply: Reply) -> None:
        pass


_NOBODY = _Nobody()

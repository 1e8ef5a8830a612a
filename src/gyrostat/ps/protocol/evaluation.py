"""`job.evaluate` of a job with servers: parts of a dataset, handed out to workers, and their results. Pure.

An evaluation is named by the last epoch that was over when it was called (-1: none) and by its number since then, so that a
worker that joins later names it alike. It may begin when that epoch is over: then every update is acknowledged by every slot,
and no worker has one in flight. The next epoch begins when no evaluation is under way. The leader takes a checkpoint
before an evaluation: a roll-back returns to the state that is evaluated, so results of parts stay valid.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import msgspec

_KEPT = 64


class EvaluationKey(msgspec.Struct, frozen=True, order=True):
    epoch: int
    number: int


class PartState(Enum):
    """Instead of a part."""

    WAIT = "wait"
    """Other workers hold the last parts."""
    COMPLETE = "complete"
    """All parts have results."""


@dataclass
class _Evaluation:
    parts: int
    todo: deque[range]
    doing: dict[int, tuple[str, range]] = field(default_factory=dict)
    """By first item: the worker, and the part."""
    results: dict[int, bytes] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.results) == self.parts


class Evaluations:
    """The evaluations of one job. The newest results are kept for workers that come late."""

    def __init__(self) -> None:
        self._evaluations: dict[EvaluationKey, _Evaluation] = {}

    @property
    def under_way(self) -> bool:
        """The next epoch must not begin."""
        return any(not each.complete for each in self._evaluations.values())

    def knows(self, key: EvaluationKey) -> bool:
        """It has begun, or is complete: no need to wait for anything."""
        return key in self._evaluations

    def next_part(self, worker: str, key: EvaluationKey, items: int, part_size: int) -> range | PartState:
        """A part of items 0 … items-1 for a worker. The first request begins the evaluation."""
        found = self._evaluations.get(key)
        if found is None:
            parts = [range(start, min(start + part_size, items)) for start in range(0, items, part_size)]
            found = self._evaluations[key] = _Evaluation(len(parts), deque(parts))
            for old in sorted(self._evaluations)[:-_KEPT]:
                del self._evaluations[old]
        if found.complete:
            return PartState.COMPLETE
        if not found.todo:
            return PartState.WAIT
        part = found.todo.popleft()
        found.doing[part.start] = worker, part
        return part

    def report(self, key: EvaluationKey, part: range, result: bytes) -> None:
        """The result of a part. A second one is equal, and ignored."""
        found = self._evaluations.get(key)
        if found is not None and (part.start in found.doing or part in found.todo):
            found.doing.pop(part.start, None)
            if part in found.todo:
                found.todo.remove(part)
            found.results.setdefault(part.start, result)

    def results(self, key: EvaluationKey) -> list[bytes]:
        """All results, in the order of parts."""
        found = self._evaluations[key]
        return [found.results[start] for start in sorted(found.results)]

    def worker_lost(self, worker: str) -> None:
        """Its parts are handed out again."""
        for each in self._evaluations.values():
            for start in [start for start, (holder, _) in each.doing.items() if holder == worker]:
                each.todo.appendleft(each.doing.pop(start)[1])

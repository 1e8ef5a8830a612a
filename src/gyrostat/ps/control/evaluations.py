"""Evaluations: which worker evaluates which part of a dataset, and the results. Pure.

An evaluation begins when all live workers have come to it: then nobody trains, and all read the same parameters. A part of a
worker that is lost is given to another one. Results are kept, for workers that join later and run the script from its top.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gyrostat.core.errors import UsageError

_MOST_PARTS = 1 << 20


@dataclass
class _Evaluation:
    samples: int
    part_size: int
    arrived: set[str] = field(default_factory=set)
    begun: bool = False
    next_start: int = 0
    returned: list[int] = field(default_factory=list)
    held: dict[int, str] = field(default_factory=dict)
    """By start of the part, the worker."""
    results: dict[int, bytes] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.results) == -(-self.samples // self.part_size)


class EvaluationDesk:
    """All evaluations of a job, in order."""

    def __init__(self) -> None:
        self._evaluations: list[_Evaluation] = []

    def ask(
        self, worker: str, number: int, samples: int, part_size: int, live: AbstractSet[str]
    ) -> range | None:
        """A part for this worker; an empty one: wait; None: all parts have results."""
        evaluation = self._find(number, samples, part_size)
        evaluation.arrived.add(worker)
        evaluation.begun = evaluation.begun or live <= evaluation.arrived
        if evaluation.complete:
            return None
        if not evaluation.begun:
            return range(0)
        if evaluation.returned:
            start = evaluation.returned.pop()
        elif evaluation.next_start < evaluation.samples:
            start = evaluation.next_start
            evaluation.next_start += evaluation.part_size
        else:
            return range(0)
        evaluation.held[start] = worker
        return range(start, min(start + evaluation.part_size, evaluation.samples))

    def report(self, number: int, start: int, result: bytes) -> None:
        """The first result of a part counts: all of them are equal."""
        if not 0 <= number < len(self._evaluations):
            raise UsageError(f"evaluation {number} has not begun")
        evaluation = self._evaluations[number]
        if start not in evaluation.held and start not in evaluation.results:
            raise UsageError(f"evaluation {number} has given out no part that begins at sample {start}")
        evaluation.held.pop(start, None)
        if start in evaluation.returned:
            evaluation.returned.remove(start)
        evaluation.results.setdefault(start, result)

    def results(self, number: int) -> list[bytes]:
        if not 0 <= number < len(self._evaluations) or not self._evaluations[number].complete:
            raise UsageError(f"evaluation {number} is not complete")
        return [result for _, result in sorted(self._evaluations[number].results.items())]

    def release(self, worker: str) -> None:
        """Its parts are given to others."""
        for evaluation in self._evaluations:
            for start in [start for start, holder in evaluation.held.items() if holder == worker]:
                del evaluation.held[start]
                evaluation.returned.append(start)

    def _find(self, number: int, samples: int, part_size: int) -> _Evaluation:
        if not 0 <= number <= len(self._evaluations):
            raise UsageError(
                f"evaluation {number} comes after evaluation {len(self._evaluations) - 1}: all workers must run the same script"
            )
        if samples < 0 or part_size < 1 or samples > _MOST_PARTS * part_size:
            raise UsageError(f"an evaluation of {samples} samples in parts of {part_size}")
        if number == len(self._evaluations):
            self._evaluations.append(_Evaluation(samples, part_size))
        found = self._evaluations[number]
        if (found.samples, found.part_size) != (samples, part_size):
            raise UsageError(
                f"evaluation {number} has {found.samples} samples in parts of {found.part_size}; this worker has {samples} "
                f"in parts of {part_size}: every worker must evaluate the same dataset"
            )
        return found

"""The definition of a job: the micro-batch sizes by device type that process a global batch fastest (VirtualFlow §5.1).

Every device of type i takes v_i micro-batches of b_i samples, one after the other; all together are the global batch B:

    minimise  max over used types of  v_i t_i(b_i)  +  exchange      such that  sum n_i v_i b_i = B

b_i is a measured size, n_i at most the number of devices. Branch and bound over types: the samples that a device can process
within the best time so far bound what the remaining types can add. The result is exact for few choices; above
`EXACT_CHOICES` a branch must improve by more than `TOLERANCE`, so the result is within that of the optimum.

The result fixes the job's virtual workers and their batch sizes (`batch_size=[…]` in the script), which a placement only
moves.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile

EXACT_CHOICES = 20_000_000
TOLERANCE = 0.01
_ROUNDING = 1e-12


@dataclass(frozen=True)
class BatchShare:
    """`devices` devices of one type, each with `virtual_workers` micro-batches of `batch` samples, `seconds` each."""

    type: str
    devices: int
    virtual_workers: int
    batch: int
    seconds: float

    @property
    def samples(self) -> int:
        """Per device."""
        return self.virtual_workers * self.batch


@dataclass(frozen=True)
class Definition:
    """The division of a job's global batch over devices."""

    parts: tuple[BatchShare, ...]
    exchange: float

    @property
    def step(self) -> float:
        return max(part.virtual_workers * part.seconds for part in self.parts) + self.exchange

    @property
    def samples(self) -> int:
        return sum(part.devices * part.samples for part in self.parts)

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.samples / self.step

    @property
    def batch_sizes(self) -> list[int]:
        """One per virtual worker, in placement order: the argument of `job.dataloader(batch_size=…)`."""
        return [part.batch for part in self.parts for _ in range(part.devices * part.virtual_workers)]


def define(
    profile: Profile, *, global_batch: int, devices: Mapping[str, int], most_per_device: int = 64
) -> Definition | None:
    """The fastest definition on at most these devices and `most_per_device` virtual workers on each. None if none fits."""
    if global_batch < 1 or most_per_device < 1:
        raise UsageError(
            f"the global batch and the micro-batches per device must be at least 1, got {global_batch} and {most_per_device}"
        )
    kinds = [
        _Kind.of(profile, name, count, global_batch, most_per_device)
        for name, count in devices.items()
        if count > 0
    ]
    kinds.sort(key=lambda kind: -kind.devices * max(kind.most, default=0))
    choices = math.prod(1 + kind.devices * len(kind.loads) for kind in kinds[:-1])
    search = _Search(profile, kinds, tolerance=TOLERANCE if choices > EXACT_CHOICES else 0.0)
    for kind in kinds:  # each type alone first: a good bound, and the result where mixing does not pay
        search.complete(kind, global_batch, ())
    if kinds:
        search.branch(0, global_batch, ())
    return search.best


@dataclass(frozen=True)
class _Load:
    """Micro-batches of one device, and their time."""

    samples: int
    time: float
    virtual_workers: int
    batch: int


@dataclass(frozen=True)
class _Kind:
    """One type: its loads by ascending time, and the most samples of the loads up to each."""

    name: str
    devices: int
    loads: Sequence[_Load]
    by_samples: Mapping[int, _Load]
    times: Sequence[float]
    most: Sequence[int]

    @classmethod
    def of(cls, profile: Profile, name: str, devices: int, global_batch: int, most_per_device: int) -> _Kind:
        speed = profile.speed(name)
        fastest: dict[int, _Load] = {}
        for batch, rate in speed.throughput:
            for count in range(1, min(most_per_device, global_batch // batch) + 1):
                load = _Load(count * batch, count * batch / rate, count, batch)
                known = fastest.get(load.samples)
                if known is None or (load.time, count) < (known.time, known.virtual_workers):
                    fastest[load.samples] = load
        loads = sorted(fastest.values(), key=lambda load: (load.time, load.samples))
        most = list(accumulate((load.samples for load in loads), max))
        return cls(name, devices, loads, fastest, [load.time for load in loads], most)

    def capacity(self, time: float) -> int:
        """Samples that all its devices process within `time`."""
        index = bisect_right(self.times, time)
        return self.devices * self.most[index - 1] if index else 0


_Chosen = tuple[tuple[_Kind, int, _Load], ...]
"""A type, the number of its devices, and the load of each."""


class _Search:
    """Branch and bound; `best` is the best definition so far."""

    def __init__(self, profile: Profile, kinds: Sequence[_Kind], *, tolerance: float) -> None:
        self.best: Definition | None = None
        self._profile, self._kinds, self._keep = profile, kinds, 1 - tolerance
        self._bound = math.inf

    def branch(self, index: int, left: int, chosen: _Chosen) -> None:
        """Divide the `left` samples among `kinds[index:]`."""
        kind, later = self._kinds[index], self._kinds[index + 1 :]
        if not later:
            self.complete(kind, left, chosen)
            return
        self.branch(index + 1, left, chosen)
        for load in reversed(kind.loads[: bisect_left(kind.times, self._bound)]):
            if load.time >= self._bound:  # the bound has decreased meanwhile
                continue
            elsewhere = sum(each.capacity(self._bound) for each in later)
            fewest = max(1, -(-(left - elsewhere) // load.samples))
            for count in range(min(kind.devices, left // load.samples), fewest - 1, -1):
                more = (*chosen, (kind, count, load))
                if rest := left - count * load.samples:
                    self.branch(index + 1, rest, more)
                else:
                    self._consider(more)

    def complete(self, kind: _Kind, left: int, chosen: _Chosen) -> None:
        """One type takes all remaining samples, each of its devices the same number."""
        for count in range(1, kind.devices + 1):
            load = None if left % count else kind.by_samples.get(left // count)
            if load is not None and load.time < self._bound:
                self._consider((*chosen, (kind, count, load)))

    def _consider(self, chosen: _Chosen) -> None:
        types = [kind.name for kind, _, _ in chosen]
        exchange = self._profile.exchange_seconds(types, sum(count for _, count, _ in chosen))
        step = max(load.time for _, _, load in chosen) + exchange
        if step >= self._bound * (1 - _ROUNDING):
            return
        parts = tuple(
            BatchShare(kind.name, count, load.virtual_workers, load.batch, load.time / load.virtual_workers)
            for kind, count, load in chosen
        )
        self.best, self._bound = Definition(parts, exchange), step * self._keep

"""How a dataset is cut into shards. Only numbers: nothing is read, moved or written.

All samples are numbered 0 … samples-1, file after file. A shard is a range of these numbers within one file, so that it can be
read as one range. `queues.py` decides the order of shards in an epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate

from gyrostat.core.errors import UsageError


@dataclass(frozen=True)
class SourceSpan:
    """Contiguous samples: those of one file, or of a whole indexed dataset (no source)."""

    source: str | None
    samples: int


@dataclass(frozen=True)
class ShardLayout:
    """Parts, cut into shards of `shard_size` samples; the last of each part may be shorter."""

    parts: tuple[SourceSpan, ...]
    shard_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.shard_size, int) or self.shard_size < 1:
            raise UsageError(f"shard_size must be a whole number of at least 1, got {self.shard_size!r}")
        for part in self.parts:
            if not isinstance(part.samples, int) or part.samples < 0:
                what = "the dataset" if part.source is None else f"file {part.source!r}"
                raise UsageError(f"{what} has {part.samples!r} samples; give a whole number of at least 0")

    @classmethod
    def of_indices(cls, samples: int, shard_size: int) -> ShardLayout:
        return cls((SourceSpan(None, samples),), shard_size)

    @classmethod
    def of_files(cls, files: Sequence[tuple[str, int]], shard_size: int) -> ShardLayout:
        """`files` are names with the number of samples in each."""
        return cls(tuple(SourceSpan(str(name), samples) for name, samples in files), shard_size)

    @cached_property
    def samples(self) -> int:
        return sum(part.samples for part in self.parts)

    @cached_property
    def shards(self) -> int:
        return self._first_shards[-1]

    def bounds(self, shard: int) -> tuple[int, int]:
        """The first sample of a shard, and the one after its last."""
        part = bisect_right(self._first_shards, shard) - 1
        first = self._first_samples[part]
        start = first + (shard - self._first_shards[part]) * self.shard_size
        return start, min(start + self.shard_size, first + self.parts[part].samples)

    def shard_of(self, sample: int) -> int:
        """The number of the shard that this sample belongs to."""
        part = bisect_right(self._first_samples, sample) - 1
        return self._first_shards[part] + (sample - self._first_samples[part]) // self.shard_size

    def place(self, sample: int) -> tuple[str | None, int]:
        """The file this sample is in, and its number there."""
        part = bisect_right(self._first_samples, sample) - 1
        return self.parts[part].source, sample - self._first_samples[part]

    @cached_property
    def identity(self) -> str:
        """A digest of the layout: queues that were saved for another one cannot be restored."""
        text = repr((self.shard_size, [(part.source, part.samples) for part in self.parts]))
        return sha256(text.encode()).hexdigest()

    @cached_property
    def _first_samples(self) -> list[int]:
        """Of each part, and the end."""
        return list(accumulate((part.samples for part in self.parts), initial=0))

    @cached_property
    def _first_shards(self) -> list[int]:
        """Of each part, and the end."""
        return list(accumulate((-(-part.samples // self.shard_size) for part in self.parts), initial=0))

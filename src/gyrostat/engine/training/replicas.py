"""All workers hold the same shared state at every boundary. Every 100 steps they compare checksums of it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from gyrostat.core.errors import Diverged
from gyrostat.core.progress import Progress
from gyrostat.engine.state.digest import checksum
from gyrostat.engine.training.collectives import Collectives


def compare_replicas(shared: Mapping[str, Any], collectives: Collectives, progress: Progress) -> None:
    """Raise `Diverged`, naming the first tensor that differs, if workers do not hold equal shared state."""
    mine = checksum(shared)
    summary = zlib.crc32(msgspec.msgpack.encode(list(mine.items())))
    summaries = collectives.exchange("compare", progress, lambda: summary.to_bytes(4, "little"))
    if len(set(summaries)) == 1:
        return
    everyone = [
        msgspec.msgpack.decode(payload, type=dict[str, int])
        for payload in collectives.exchange("compare leaves", progress, lambda: msgspec.msgpack.encode(mine))
    ]
    raise Diverged(difference(everyone, progress))


def difference(checksums: list[dict[str, int]], progress: Progress) -> str:
    """Which tensor differs first, and between which workers."""
    first = checksums[0]
    for worker, other in enumerate(checksums[1:], start=1):
        for name in first.keys() | other.keys():
            if name not in first or name not in other:
                return f"workers 0 and {worker} do not hold the same state at {progress}: only one of them has {name}"
        for name, value in first.items():
            if other[name] != value:
                return (
                    f"workers 0 and {worker} do not hold the same state at {progress}: {name} differs. Every worker must "
                    "build the same objects and make the same updates; look for random numbers drawn before gyrostat.init, "
                    "for a loss of one virtual worker used outside the inner loop, or for code under job.is_main"
                )
    return f"workers do not hold the same state at {progress}"

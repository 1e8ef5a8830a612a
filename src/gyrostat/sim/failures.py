"""Node failures and repairs: a stream of changes for a simulation, determined by a seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from gyrostat.core.devices import Fleet
from gyrostat.core.errors import UsageError
from gyrostat.sched.port import Change, NodeBack, NodeLost


def failures(
    fleet: Fleet, *, between: float, repair: float, seed: int = 0, began: float = 0.0
) -> Iterator[tuple[float, Change]]:
    """Each node runs for `between` seconds on average and is then down for `repair`; both exponential. Endless."""
    if between <= 0 or repair <= 0:
        raise UsageError(
            f"times between failures and for repair must be positive, got {between} and {repair}"
        )
    draw = random.Random(seed)
    heap = [(began + draw.expovariate(1 / between), number, True) for number in range(len(fleet.nodes))]
    heapq.heapify(heap)
    while True:
        at, number, fails = heapq.heappop(heap)
        name = fleet.nodes[number].name
        yield at, NodeLost(name) if fails else NodeBack(name)
        mean = repair if fails else between
        heapq.heappush(heap, (at + draw.expovariate(1 / mean), number, not fails))

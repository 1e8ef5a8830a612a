"""What one event costs in simulations of 100,000 and a million jobs, against one of 10,000, at the same load.

Jobs are drawn: arrivals at random, exponential durations, 1 to 8 devices, on 64 nodes with 8 devices at 80 % load,
first in first out. While the large simulation runs, small ones take turns with it, so that both meet the same
machine. Processor time per event.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from figures import Figure, Options, Target, main
from gyrostat.core.devices import Fleet
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.policies import find_policy
from gyrostat.sched.tenant_state import Vc
from gyrostat.sim.job import TraceJob
from gyrostat.sim.simulate import simulate
from pairs import Pair, show_progress

SIZES = (1, 1, 1, 1, 2, 2, 4, 8)
SMALL = 10_000
TURNS = 10
TARGET = Target(at_most=1.2)
NODES, LOAD, MEAN_DURATION = 64, 0.8, 1000.0


def jobs(number: int, seed: int) -> Iterator[TraceJob]:
    draw = random.Random(seed)
    gap = MEAN_DURATION * sum(SIZES) / len(SIZES) / (NODES * 8 * LOAD)
    now = 0.0
    for k in range(number):
        now += draw.expovariate(1 / gap)
        request = JobRequest(id=JobId(str(k)), vc="all", submitted=now, devices=draw.choice(SIZES))
        yield TraceJob(request, draw.expovariate(1 / MEAN_DURATION))


def cost(number: int, seed: int, progress: Callable[[int], None] | None = None) -> tuple[float, int]:
    """Processor seconds, and events."""
    fleet = Fleet.uniform("gpu", NODES, 8)
    began = time.process_time()
    vcs = [Vc(name="all", policy=find_policy("fifo"))]
    result = simulate(fleet, vcs, NodePlacer(fleet), jobs(number, seed), progress=progress)
    assert len(result.records) == number
    return time.process_time() - began, result.events


def measure_one(number: int, seed: int) -> Pair:
    """Microseconds per event, of the large simulation and of small ones in between."""
    small_seconds, small_events, turns = 0.0, 0, 0

    def take_turns(done: int) -> None:
        nonlocal small_seconds, small_events, turns
        if done * TURNS >= turns * number:
            seconds, events = cost(SMALL, seed + turns)
            small_seconds += seconds
            small_events += events
            turns += 1

    seconds, events = cost(number, seed, take_turns)
    return Pair(1e6 * (seconds - small_seconds) / events, 1e6 * small_seconds / small_events)


def measure(options: Options) -> Iterator[Figure]:
    sizes = (20_000,) if options.pairs == 3 else (100_000, 1_000_000)
    for number in sizes:
        pairs = []
        rounds = options.pairs if number <= 100_000 else max(1, options.pairs // 3)
        for pair in range(rounds):
            pairs.append(measure_one(number, seed=100 * pair))
            show_progress(pair + 1, rounds, f"{pairs[-1].ours:.1f} against {pairs[-1].theirs:.1f} µs")
        yield Figure(
            name=f"an event among {number:,} jobs against one among {SMALL:,}",
            ours=f"{number:,} jobs",
            theirs=f"{SMALL:,} jobs",
            unit="µs",
            pairs=pairs,
            target=TARGET,
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)

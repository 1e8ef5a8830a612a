"""A worker at 75 % of the others' speed: throughput once virtual workers are re-placed, against the best integer placement.

4 workers with 32 virtual workers and 8 with 128, paced. The job begins with even shares and finds out by itself. The other side
is a job that is started with the shares that are best for these speeds, found by trying all lengths of a step. A second figure
compares the shares themselves, by what a step takes with them on devices of exactly these speeds; a third is how long the
straggler went unnoticed, in seconds of steps, as a share of the 10 that are allowed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from elastic_job import SMALL, ElasticJob
from figures import Figure, Options, Target, main
from gyrostat.job.control.instructions import ReconfigurationDone
from gyrostat.job.diagnostics.stragglers import Reaction, Straggler, StragglerPolicy
from gyrostat.job.processes.start import WorkerForkServer, WorkerSource
from pairs import Pair, show_progress

TARGET = Target(at_least=0.97)
SOON = Target(at_most=1.0)
ALLOWED_S = 10.0
MICRO_BATCH = 1
SECONDS = 0.025
"""That a full-speed worker takes for a virtual worker."""
ARGS = (*SMALL, "--batch", str(MICRO_BATCH))
SIZES = ((4, 32), (8, 128))


def best(virtual_workers: int, seconds: Sequence[float]) -> list[int]:
    """The shares with the shortest step: the least time in which all workers together run `virtual_workers`."""
    lengths = sorted({count * time for time in seconds for count in range(1, virtual_workers + 1)})
    for length in lengths:
        most = [int(length / time + 1e-9) for time in seconds]
        if sum(most) >= virtual_workers and min(most) >= 1:
            break
    while sum(most) > virtual_workers:  # whoever would be the last to end has one fewer
        slowest = max(range(len(most)), key=lambda worker: most[worker] * seconds[worker])
        most[slowest] -= 1
    return most


class Slowed(ElasticJob):
    """Notes when its straggler was noticed, and when virtual workers were re-placed."""

    def __init__(self, source: WorkerSource, workers: int, virtual_workers: int) -> None:
        self.replaced = threading.Event()
        self.shares: tuple[int, ...] = ()
        self.noticed_after = 0
        super().__init__(
            source,
            virtual_workers=virtual_workers,
            workers=workers,
            paced=rates(workers),
            args=ARGS,
            stragglers=StragglerPolicy(reaction=Reaction.REPLACE),
        )

    def noticed(self, straggler: Straggler) -> None:
        self.noticed_after = self.noticed_after or self.last_step

    def resized(self, done: ReconfigurationDone) -> None:
        self.shares = done.change.counts or ()
        self.replaced.set()


def length(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Of a step."""
    return max(count * time for count, time in zip(shares, seconds, strict=True))


def rates(workers: int) -> list[float]:
    full = MICRO_BATCH / SECONDS
    return [full] * (workers - 1) + [0.75 * full]


def measure(options: Options) -> Iterator[Figure]:
    for workers, virtual_workers in SIZES:
        seconds = [MICRO_BATCH / rate for rate in rates(workers)]
        shares = best(virtual_workers, seconds)
        speeds, lengths, found = [], [], []
        with WorkerForkServer() as parent:
            for number in range(options.pairs):
                with Slowed(parent, workers, virtual_workers) as job:
                    job.replaced.wait()
                    ours = 1 / job.steady(20)
                    until = sum(job.times(2, job.noticed_after))
                    lengths.append(Pair(1 / length(job.shares, seconds), 1 / length(shares, seconds)))
                with ElasticJob(
                    parent,
                    virtual_workers=virtual_workers,
                    workers=workers,
                    paced=rates(workers),
                    args=ARGS,
                    placement=shares,
                ) as known:
                    theirs = 1 / known.steady(20)
                speeds.append(Pair(ours, theirs))
                found.append(Pair(until, ALLOWED_S))
                show_progress(number + 1, options.pairs, f"{ours:.4g} of {theirs:.4g} steps/s")
        name = f"{workers} workers, {virtual_workers} virtual workers"
        yield Figure(
            name=f"{name}: speed beside a straggler",
            ours="re-placed",
            theirs=f"best ({', '.join(map(str, shares))})",
            unit="steps/s",
            pairs=speeds,
            target=TARGET,
        )
        yield Figure(
            name=f"{name}: the shares it chose",
            ours="chosen",
            theirs="best",
            unit="steps/s",
            pairs=lengths,
            target=TARGET,
        )
        yield Figure(
            name=f"{name}: until it is noticed",
            ours="took",
            theirs="allowed",
            unit="s of steps",
            pairs=found,
            target=SOON,
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)

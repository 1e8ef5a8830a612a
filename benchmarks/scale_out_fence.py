"""A scale-out of a job with 25 million parameters and momentum: for how long training stands still at the fence.

Beside it the time that a broadcast of all state from one member to the newcomers takes while everybody waits, which is what a
fence costs that begins with it (EDL §4.2). From 1 worker to 2 everything computes; from 4 to 8 devices are paced.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from elastic_job import ElasticJob
from figures import Figure, Options, Target, main
from gyrostat.job.processes.start import WorkerForkServer
from pairs import measure_pairs
from sides import HERE

TARGET = Target(at_most=0.1)
SAMPLES_PER_SECOND = 8.0
"""Of a paced device: a step of eight virtual workers with 4 samples each takes 1 s on four."""


class Broadcast:
    """Processes that hold the state, and newcomers that want it."""

    def __init__(self, old: int, ranks: int, directory: str) -> None:
        command = [sys.executable, str(HERE / "side_broadcast.py"), "--ranks", str(ranks), "--old", str(old)]
        command += ["--store", f"{directory}/store-{ranks}"]
        self._processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]

    def seconds(self) -> float:
        first = self._processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        return float(first.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            process.communicate()


def measure(options: Options) -> Iterator[Figure]:
    for old, new, paced in ((1, 2, ()), (4, 8, (SAMPLES_PER_SECOND,))):
        with WorkerForkServer() as parent, tempfile.TemporaryDirectory() as directory:
            job = ElasticJob(parent, virtual_workers=8 if paced else 2, workers=old, paced=paced)
            with job, Broadcast(old, new, directory) as broadcast:
                broadcast.seconds()  # connections are made by the first one

                def ours(job: ElasticJob = job, old: int = old, new: int = new) -> float:
                    job.scale(old)
                    return max(0.0, job.scale(new).blocked)

                pairs = measure_pairs(ours, broadcast.seconds, options.pairs)
        yield Figure(
            name=f"{old} to {new} workers{', paced' if paced else ''}: training stands still",
            ours="at the fence",
            theirs="for a broadcast",
            unit="s",
            pairs=pairs,
            target=TARGET,
        )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=10)

"""Parameter servers with 1 GB of tables (`--gigabytes`), while a worker trains:

- the longest wait of the worker while slots move from 1 server to 4, against DLRover's way, which is built here: halt, write a
  checkpoint, partition it anew, start servers that read it, go on;
- from SIGKILL of one of two servers to the next accepted push: all slots go back to the last checkpoint (`exact`; the work that
  is done again is not part of it), and with mirrors (`replica`);
- the memory of server processes against the bytes of ids, rows and optimizer state.

Servers are processes. The worker makes steps of 512 × 26 ids of the table one after the other, and counts how long each took.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from figures import Figure, Options, Target, main
from gyrostat.core.roles import ServerRecovery
from gyrostat.data.shards.messages import Shard
from gyrostat.ps.client.port import Batch, Pull, TermOver, WholeUpdate
from gyrostat.ps.client.remote import RemoteServers
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.store.hashing import Keys, keys_of
from gyrostat.ps.store.optimizers import RowAdagrad
from gyrostat.ps.store.spec import StoreSpec, TableSpec
from pairs import Pair, show_progress
from ps_leader import LedJob

WIDTH, SLOTS = 16, 256
_ROW_BYTES = 8 + 4 * WIDTH + 4
_STEP_KEYS = 7000
_FILL_KEYS = 100_000
_BATCHES = 1_000_000
SPEC = StoreSpec(slots=SLOTS, tables=(TableSpec(name="items", width=WIDTH, optimizer=RowAdagrad(lr=0.05)),))
DATA = DataSpec(samples=_BATCHES, batch_size=1, shard_size=_BATCHES)


class TrainingWorker:
    """Fills the table, then makes steps in a thread until it is told to end. Of each step: when it ended, how long it took."""

    def __init__(self, job: LedJob, rows: int) -> None:
        self._servers = RemoteServers(job.address, job.token, "worker")
        self._servers.open(SPEC, DATA)
        self._rows, self._number = rows, 0
        self._random = np.random.default_rng(3)
        self._shard: Shard | None = None
        self.steps: list[tuple[float, float]] = []
        self.terms_over = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run)

    def fill(self) -> None:
        """Rows are made by their first gradient."""
        self._ask()
        for start in range(0, self._rows, _FILL_KEYS):
            self._push(np.sort(keys_of(np.arange(start, min(start + _FILL_KEYS, self._rows)), "items")))

    def start(self) -> None:
        self._thread.start()

    def halt(self) -> None:
        """Make no more steps."""
        self._ended = True
        self._thread.join()

    def close(self) -> None:
        self._servers.close()

    def end(self) -> None:
        self.halt()
        self.close()

    def wait_for_steps(self, more: int = 20) -> None:
        wanted = len(self.steps) + more
        while len(self.steps) < wanted:
            time.sleep(0.01)

    def longest(self, since: float) -> float:
        """Milliseconds of the longest step that ended since then."""
        return 1e3 * max(seconds for at, seconds in self.steps if at >= since)

    def _ask(self) -> None:
        while self._shard is None:
            found = self._servers.next_shard(0)
            assert isinstance(found, Shard)
            self._shard = found

    def _push(self, keys: Keys) -> None:
        gradients = np.full((len(keys), WIDTH), 0.01, np.float32)
        update = WholeUpdate(Batch(0, self._number % _BATCHES), {0: (keys, gradients)})
        self._servers.exchange(update, Pull({0: keys[:_STEP_KEYS]}))
        self._number += 1

    def _run(self) -> None:
        while not self._ended:
            began = time.monotonic()
            keys = np.unique(keys_of(self._random.integers(0, self._rows, _STEP_KEYS), "items"))
            try:
                self._ask()
                self._push(keys)
            except TermOver:
                self._shard = None
                self.terms_over += 1
                continue
            now = time.monotonic()
            self.steps.append((now, now - began))


def made_settings(directory: Path, servers: int, recovery: ServerRecovery) -> PsSettings:
    return PsSettings(
        directory=directory,
        servers=servers,
        recovery=recovery,
        checkpoint_seconds=1e9,
        adjust_seconds=0,
        keep=1,
    )


@contextlib.contextmanager
def training(
    rows: int, servers: int, recovery: ServerRecovery = ServerRecovery.EXACT
) -> Iterator[tuple[LedJob, TrainingWorker, Path]]:
    """A job whose table is filled, and a worker that trains."""
    with tempfile.TemporaryDirectory(prefix="gyrostat-ps-", dir=_options.directory) as name:
        with LedJob(made_settings(Path(name), servers, recovery)) as job:
            worker = TrainingWorker(job, rows)
            worker.fill()
            worker.start()
            worker.wait_for_steps()
            try:
                yield job, worker, Path(name)
            finally:
                worker.end()


def settled(job: LedJob, servers: int) -> None:
    def reached() -> bool:
        status = job.call(job.status)
        return (
            status.settled and len(status.servers) == servers and all(each.slots for each in status.servers)
        )

    while not reached():
        time.sleep(0.01)


def checkpointed(job: LedJob) -> None:
    done = threading.Event()
    job.call(lambda: job.leader.checkpoint(lambda _: done.set()))
    assert done.wait(600)


def our_move(rows: int) -> tuple[float, float]:
    """Milliseconds: the longest step while slots move 1 → 4; and the median of undisturbed ones."""
    with training(rows, 1) as (job, worker, _):
        usual = 1e3 * float(np.median([seconds for _, seconds in worker.steps]))
        began = time.monotonic()
        job.call(lambda: job.leader.scale(4))
        settled(job, 4)
        worker.wait_for_steps()
        return worker.longest(began), usual


def dlrovers_move(rows: int) -> float:
    """Milliseconds for which the worker is halted: a checkpoint, then 4 servers that read it, each a part."""
    with tempfile.TemporaryDirectory(prefix="gyrostat-ps-", dir=_options.directory) as name:
        directory = Path(name)
        with LedJob(made_settings(directory, 1, ServerRecovery.EXACT)) as job:
            worker = TrainingWorker(job, rows)
            worker.fill()
            worker.start()
            worker.wait_for_steps()
            worker.halt()
            began = time.monotonic()
            checkpointed(job)
            worker.close()
        with LedJob(made_settings(directory, 4, ServerRecovery.EXACT)) as job:
            worker = TrainingWorker(job, rows)
            worker.start()
            worker.wait_for_steps(1)
            halted = 1e3 * (worker.steps[0][0] - began)
            worker.end()
        return halted


def our_kill(rows: int, recovery: ServerRecovery) -> tuple[float, float, float]:
    """Seconds from SIGKILL to the next accepted push; then memory and payload of all servers, before it."""
    with training(rows, 2, recovery) as (job, worker, _):
        checkpointed(job)
        settled(job, 2)
        worker.wait_for_steps()
        time.sleep(1.2)  # servers tell their memory every half second
        status = job.call(job.status)
        memory = sum(server.memory_bytes for server in status.servers)
        payload = sum(server.payload_bytes for server in status.servers)
        killed_at = time.monotonic()
        os.kill(status.servers[0].pids[0], signal.SIGKILL)
        while worker.steps[-1][0] - worker.steps[-1][1] <= killed_at:
            time.sleep(0.001)
        first = next(at for at, _ in worker.steps if at > killed_at + 0.005)
        return first - killed_at, memory, payload


def measure(options: Options) -> list[Figure]:
    rows = int((0.05 if options.quick else _options.gigabytes) * 1e9 / _ROW_BYTES)
    size = f"{rows * _ROW_BYTES / 1e9:.2f} GB of tables"
    moves, limits, memories = [], [], []
    kills: dict[ServerRecovery, list[Pair]] = {each: [] for each in ServerRecovery}
    for number in range(options.pairs):
        longest, usual = our_move(rows)
        theirs = dlrovers_move(rows)
        moves.append(Pair(longest, theirs))
        limits.append(Pair(longest, 50.0))
        for recovery, limit in ((ServerRecovery.EXACT, 1.0), (ServerRecovery.REPLICA, 0.2)):
            seconds, memory, payload = our_kill(rows, recovery)
            kills[recovery].append(Pair(seconds, limit))
            if recovery is ServerRecovery.EXACT:
                memories.append(Pair(memory / 1e6, (1.3 * payload + 2 * 60e6) / 1e6))
        show_progress(
            number + 1, options.pairs, f"{longest:.0f} ms (usual {usual:.0f}) against {theirs:.0f} ms"
        )

    def figure(name: str, ours: str, theirs: str, unit: str, pairs: list[Pair], most: float) -> Figure:
        return Figure(
            name=f"{name}, {size}",
            ours=ours,
            theirs=theirs,
            unit=unit,
            pairs=pairs,
            target=Target(at_most=most),
        )

    move = "the longest wait of a worker while slots move from 1 server to 4"
    return [
        figure(move, "longest step", "to reach", "ms", limits, 1.0),
        figure(f"{move}, against DLRover's way", "longest step", "halted", "ms", moves, 0.05),
        figure(
            "SIGKILL of a server to the next accepted push, exact",
            "seconds",
            "to reach",
            "s",
            kills[ServerRecovery.EXACT],
            1.0,
        ),
        figure(
            "SIGKILL of a server to the next accepted push, replica",
            "seconds",
            "to reach",
            "s",
            kills[ServerRecovery.REPLICA],
            1.0,
        ),
        figure(
            "memory of 2 server processes against 1.3 times the payload and 60 MB each",
            "resident",
            "to reach",
            "MB",
            memories,
            1.0,
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--directory", help="where checkpoints are written (default: of temporary files)")
    _options, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    main(__doc__ or "", measure, pairs=3)

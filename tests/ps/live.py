"""A job with real processes: a leader whose loop runs in a thread of the test, server processes, and workers that are processes
or threads of the test.

Batch b of epoch e adds the epoch's weight to element b of every slot's dense piece and of one row in every slot, and to the row
of each of its samples: SGD, lr 1 and negative gradients. So the values show which updates were applied how often: a missing one
and a double one of another epoch do not cancel out.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from gyrostat.data.shards.messages import EpochOver
from gyrostat.ps.client.port import Batch, ParameterServers, Pull, TermOver, WholeUpdate
from gyrostat.ps.client.remote import RemoteServers
from gyrostat.ps.control.leader import PsLeader
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.control.status import PsEvent, PsEventKind, PsStatus
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.protocol.delivery import ShardBatches
from gyrostat.ps.store.hashing import Keys, keys_of
from gyrostat.ps.store.optimizers import SGD
from gyrostat.ps.store.spec import DenseSpec, StoreSpec, TableSpec

PATIENCE = 60.0


class CountingJob(msgspec.Struct, frozen=True):
    """The sizes of a job that counts."""

    slots: int = 8
    samples: int = 256
    batch_size: int = 4
    shard_size: int = 16

    @property
    def batches(self) -> int:
        return self.samples // self.batch_size

    @property
    def spec(self) -> StoreSpec:
        return StoreSpec(
            slots=self.slots,
            tables=(
                TableSpec(name="batches", width=self.batches, optimizer=SGD(lr=1.0), initial_scale=0.0),
                TableSpec(name="samples", width=2, optimizer=SGD(lr=1.0), initial_scale=0.0),
            ),
            dense=(DenseSpec(name="model", size=self.slots * self.batches, optimizer=SGD(lr=1.0)),),
        )

    @property
    def data(self) -> DataSpec:
        return DataSpec(samples=self.samples, batch_size=self.batch_size, shard_size=self.shard_size, seed=3)

    @property
    def slot_keys(self) -> Keys:
        """One key in every slot."""
        shift = np.uint64(64 - (self.slots.bit_length() - 1))
        return (np.arange(self.slots, dtype=np.uint64) << shift) + np.uint64(7)

    def update(self, epoch: int, batch: int) -> WholeUpdate:
        gradient = np.zeros((self.slots, self.batches), np.float32)
        gradient[:, batch] = -weight(epoch)
        samples = np.arange(batch * self.batch_size, (batch + 1) * self.batch_size)
        keys = np.sort(keys_of(samples, "samples"))
        rows = np.full((len(keys), 2), -weight(epoch), np.float32)
        return WholeUpdate(
            Batch(epoch, batch), {0: (self.slot_keys, gradient.copy()), 1: (keys, rows)}, {0: gradient}
        )

    def pull(self) -> Pull:
        keys = np.sort(keys_of(np.arange(self.samples), "samples"))
        return Pull({0: self.slot_keys, 1: keys}, (0,))


def weight(epoch: int) -> int:
    return 1 + 37 * epoch % 64


def open_worker(servers: ParameterServers, job: CountingJob) -> None:
    servers.open(job.spec, job.data)
    servers.begin_dense({0: np.zeros((job.slots, job.batches), np.float32)})


def train(
    servers: ParameterServers,
    job: CountingJob,
    epochs: Callable[[], int],
    at: Callable[[str], None] = lambda point: None,
) -> int:
    """Train epochs until there are enough. Returns the number of batches that this worker has trained."""
    trained = epoch = 0
    while epoch < epochs():
        try:
            at("worker asks")
            shard = servers.next_shard(epoch)
            if isinstance(shard, EpochOver):
                epoch += 1
                continue
            work = ShardBatches(shard, job.batch_size)
            work.skip(servers.which_applied(work.asked).tolist())
            for number, _ in work:
                servers.exchange(job.update(epoch, number), job.pull())
                at("worker has pushed")
                trained += 1
            at("worker reports")
            servers.report(shard, len(shard))
        except TermOver:
            continue
    return trained


def check_counts(servers: ParameterServers, job: CountingJob, epochs: int) -> None:
    """Every batch of every epoch once, in every slot and in the row of each of its samples."""
    pulled = servers.exchange(None, job.pull())
    total = sum(map(weight, range(epochs)))
    assert (pulled.dense[0] == total).all(), "dense pieces"
    assert (pulled.rows[0] == total).all(), "a row of every slot"
    assert (pulled.rows[1] == total).all(), "rows of samples"


@dataclass
class LiveJob:
    """A leader in a thread. `with` ends everything."""

    settings: PsSettings
    events: list[PsEvent] = field(default_factory=list)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    clients: list[RemoteServers] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, self._run_calls)
        self._calls: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.leader = PsLeader(self.settings, self._selector, self)
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop)

    def __enter__(self) -> LiveJob:
        self.leader.begin()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self.clients:
            client.close()
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self._ended = True
        os.write(self._waker, b"!")
        self._thread.join()
        self.leader.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)
        if self._error is not None:
            raise self._error

    def ps_event(self, event: PsEvent) -> None:
        self.events.append(event)

    def count(self, kind: PsEventKind) -> int:
        return sum(event.kind is kind for event in self.events)

    def call(self, action: Callable[[], Any]) -> Any:
        """In the loop's thread."""
        done = threading.Event()
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(action())
            except Exception as error:
                result.append(error)
            done.set()

        with self._lock:
            self._calls.append(run)
        os.write(self._waker, b"!")
        assert done.wait(PATIENCE), "the leader does not respond"
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    def status(self) -> PsStatus:
        status = self.call(self.leader.status)
        assert isinstance(status, PsStatus)
        return status

    def wait(self, condition: Callable[[PsStatus], bool], what: str) -> PsStatus:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self._error is None, self._error
            status = self.status()
            if condition(status):
                return status
            time.sleep(0.005)
        raise AssertionError(f"not reached: {what}; {self.status()}; {self.events[-10:]}")

    def connect(self, job: CountingJob, name: str = "test") -> RemoteServers:
        servers = RemoteServers(self.leader.address, self.leader.token, name)
        self.clients.append(servers)
        open_worker(servers, job)
        return servers

    def start_worker(self, job: CountingJob, name: str, directory: Path) -> subprocess.Popen[bytes]:
        """A process that trains as many epochs as the file `epochs` in the directory says."""
        process = start_worker(job, self.leader.address, self.leader.token, name, directory)
        self.workers.append(process)
        return process

    def _loop(self) -> None:
        try:
            while not self._ended:
                self.leader.tick()
                for key, _ in self._selector.select(max(0.0, self.leader.deadline() - time.monotonic())):
                    key.data()
        except BaseException as error:
            self._error = error

    def _run_calls(self) -> None:
        os.read(self._wake, 4096)
        with self._lock:
            calls, self._calls = self._calls, []
        for each in calls:
            each()


class WorkerSettings(msgspec.Struct, frozen=True):
    job: CountingJob
    address: tuple[str, int]
    token: bytes
    name: str
    directory: str
    """With a file `epochs`, and the points at which the worker kills itself (`kill_points`)."""


def start_worker(
    job: CountingJob, address: tuple[str, int], token: bytes, name: str, directory: Path
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ps.live"], stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdin is not None
    settings = WorkerSettings(job, address, token, name, str(directory))
    process.stdin.write(msgspec.json.encode(settings) + b"\n")
    process.stdin.close()
    return process


def settings(directory: Path, **changes: Any) -> PsSettings:
    return replace(PsSettings(directory=directory, load_seconds=0.05), **changes)


def main() -> None:
    from tests.ps.kill_points import Armed, KilledWorker

    mine = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
    directory = Path(mine.directory)
    armed = KilledWorker.armed = Armed(directory)
    servers = KilledWorker(mine.address, mine.token, mine.name)
    open_worker(servers, mine.job)
    train(servers, mine.job, lambda: int((directory / "epochs").read_text()), armed.reach)
    servers.close()


if __name__ == "__main__":
    main()

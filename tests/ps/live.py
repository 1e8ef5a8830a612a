"""A job with real processes: a leader whose loop runs in a thread of the test, server processes, and workers that are processes
or threads of the test.

Batch b of epoch e adds 1 to element (e, b) of every slot's dense piece and to one row in every slot, and 1 to the row of each
of its samples. With SGD, lr 1 and gradients of -1, values are counts.
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
from gyrostat.ps.client.port import Batch, Pull, TermOver, WholeUpdate
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
    epochs: int = 2

    @property
    def batches(self) -> int:
        return self.samples // self.batch_size

    @property
    def spec(self) -> StoreSpec:
        width = self.epochs * self.batches
        return StoreSpec(
            slots=self.slots,
            tables=(
                TableSpec(name="batches", width=width, optimizer=SGD(lr=1.0), initial_scale=0.0),
                TableSpec(name="samples", width=2, optimizer=SGD(lr=1.0), initial_scale=0.0),
            ),
            dense=(DenseSpec(name="model", size=self.slots * width, optimizer=SGD(lr=1.0)),),
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
        width = self.epochs * self.batches
        gradient = np.zeros((self.slots, width), np.float32)
        gradient[:, epoch * self.batches + batch] = -1
        samples = np.arange(batch * self.batch_size, (batch + 1) * self.batch_size)
        keys = np.sort(keys_of(samples, "samples"))
        ones = np.full((len(keys), 2), -1, np.float32)
        return WholeUpdate(
            Batch(epoch, batch), {0: (self.slot_keys, gradient.copy()), 1: (keys, ones)}, {0: gradient}
        )

    def pull(self) -> Pull:
        keys = np.sort(keys_of(np.arange(self.samples), "samples"))
        return Pull({0: self.slot_keys, 1: keys}, (0,))


def open_worker(job: CountingJob, address: tuple[str, int], token: bytes, name: str) -> RemoteServers:
    servers = RemoteServers(address, token, name)
    servers.open(job.spec, job.data)
    servers.begin_dense({0: np.zeros((job.slots, job.epochs * job.batches), np.float32)})
    return servers


def train(
    servers: RemoteServers, job: CountingJob, *, before: Callable[[int, int], None] | None = None
) -> int:
    """All epochs. Returns the number of batches trained by this worker. `before`: called with each update."""
    trained = 0
    for epoch in range(job.epochs):
        while True:
            try:
                shard = servers.next_shard(epoch)
                if isinstance(shard, EpochOver):
                    break
                work = ShardBatches(shard, job.batch_size)
                work.skip(servers.which_applied(work.asked).tolist())
                for number, _ in work:
                    if before is not None:
                        before(epoch, number)
                    servers.exchange(job.update(epoch, number), job.pull())
                    trained += 1
                servers.report(shard, len(shard))
            except TermOver:
                continue
    return trained


def check_counts(servers: RemoteServers, job: CountingJob) -> None:
    """Every batch once in every slot, and every sample once per epoch."""
    pulled = servers.exchange(None, job.pull())
    assert (pulled.dense[0] == 1).all(), "dense pieces"
    assert (pulled.rows[0] == 1).all(), "a row of every slot"
    assert (pulled.rows[1] == job.epochs).all(), "rows of samples"


@dataclass
class LiveJob:
    """A leader in a thread. `with` ends everything."""

    settings: PsSettings
    events: list[PsEvent] = field(default_factory=list)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

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
        return open_worker(job, self.leader.address, self.leader.token, name)

    def start_worker(self, job: CountingJob, name: str) -> subprocess.Popen[bytes]:
        """A process that trains all epochs."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ps.live"], stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        assert process.stdin is not None
        settings = WorkerSettings(job, self.leader.address, self.leader.token, name)
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.close()
        self.workers.append(process)
        return process

    def _loop(self) -> None:
        try:
            while not self._ended:
                self.leader.tick()
                deadline = self.leader.deadline()
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                for key, _ in self._selector.select(wait):
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


def settings(directory: Path, **changes: Any) -> PsSettings:
    return replace(PsSettings(directory=directory, load_seconds=0.05), **changes)


def main() -> None:
    mine = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
    servers = open_worker(mine.job, mine.address, mine.token, mine.name)
    train(servers, mine.job)
    servers.close()


if __name__ == "__main__":
    main()

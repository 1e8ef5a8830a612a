"""Requests of workers: shards, evaluations, checkpoints. What cannot be answered yet is tried again after each event.

The end of an epoch is answered when a checkpoint that has all of the epoch is valid. So nothing that a script does after an
epoch ever has to be undone: parameters and queues do not go back behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.data.shards.messages import AskShard, EpochOver, LeaveShards, ReportVerdict, Shard, ShardReport
from gyrostat.ps.control.pending import number_after_now
from gyrostat.ps.control.status import PsWorkerStatus
from gyrostat.ps.protocol.coordinator import ServerCoordinator
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.protocol.evaluation import Evaluations, PartState
from gyrostat.ps.wire.connection import PsConnection
from gyrostat.ps.wire.control import (
    Answered,
    CloseWorker,
    EvaluateNext,
    EvaluateReport,
    EvaluateResults,
    FromWorker,
    JobProgress,
    NewMap,
    NextShard,
    RenewShards,
    ReportShard,
    RequestRefused,
    SaveJob,
    send_control,
)

_MOST_HELD = 1000
_MOST_PARTS = 1 << 20


@dataclass
class _Worker:
    name: str
    connection: PsConnection
    heard: float
    waiting: FromWorker | None = None
    """The request that is not answered yet."""
    save_number: int = 0
    """The checkpoint that it waits for has this number or a higher one."""
    samples: int = 0
    """Reported."""


class WorkerDesk:
    """All workers of a job."""

    def __init__(self, coordinator: ServerCoordinator, data: DataSpec, lease_seconds: float) -> None:
        self._coordinator, self._data, self._lease_seconds = coordinator, data, lease_seconds
        self._evaluations = Evaluations()
        self._workers: dict[str, _Worker] = {}
        self._held: dict[str, Shard] = {}
        """The last shard of each worker, also of some that have gone: evidence if it made them fail."""
        self._sent_version = -1
        self._gone: set[str] = set()
        self.checkpoint_wanted = False
        """Somebody waits for one."""

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def updates(self) -> int:
        """Batches that are reported as trained."""
        queues, data = self._coordinator.queues, self._data
        per_epoch = -(-data.samples // data.batch_size)
        return queues.epoch * per_epoch + (per_epoch if queues.over else queues.done // data.batch_size)

    @property
    def samples(self) -> int:
        """Reported, in all epochs."""
        queues = self._coordinator.queues
        return queues.epoch * self._data.samples + queues.done

    def progress(self, name: str) -> JobProgress:
        """`name`: of the worker that is told."""
        oldest = next(iter(self._workers), name)
        coordinator = self._coordinator
        return JobProgress(self.updates, coordinator.queues.epoch, coordinator.committed, oldest == name)

    # Workers come and go.

    def join(self, name: str, connection: PsConnection, now: float) -> None:
        """A worker whose name is in use takes the place of the other."""
        if name in self._gone:
            raise UsageError(f"worker {name!r} was given up; a worker that joins needs another name")
        known = self._workers.get(name)
        if known is not None and known.connection is not connection:
            self.lose(name, now)
            known.connection.close()
        self._workers[name] = _Worker(name, connection, now)
        send_control(connection, NewMap(self._coordinator.map))

    def knows(self, name: str, connection: PsConnection) -> bool:
        return name in self._workers and self._workers[name].connection is connection

    def lose(self, name: str, now: float) -> None:
        """What it holds goes to others."""
        self._workers.pop(name, None)
        self._coordinator.worker_lost(name)
        self._evaluations.worker_lost(name)
        self.retry(now)

    def give_up(self, name: str, now: float) -> None:
        """It has ended, or hangs: it cannot come back under this name."""
        self._gone.add(name)
        worker = self._workers.get(name)
        if worker is not None:
            worker.connection.close()
        self.lose(name, now)

    def held_by(self, name: str) -> Shard | None:
        """The shard that a worker holds, or held when it was lost."""
        return self._held.get(name)

    # Requests.

    def request(self, name: str, request: FromWorker, data: bytes, now: float) -> None:
        worker = self._workers[name]
        worker.heard = now
        if isinstance(request, RenewShards):
            self._coordinator.queues.renew(name, now)
            return
        if isinstance(request, SaveJob):
            worker.save_number = number_after_now(self._coordinator)
        worker.waiting = request
        changes = self._try(worker, data, now)
        if changes:
            self.retry(now)

    def retry(self, now: float) -> None:
        """Something has changed: answer those that can be answered now."""
        for worker in list(self._workers.values()):
            if worker.waiting is not None:
                self._try(worker, b"", now)

    def tick(self, now: float) -> None:
        """Shards and parts of workers that are silent go to others."""
        returned = self._coordinator.queues.expire(now)
        silent = [
            worker.name for worker in self._workers.values() if now - worker.heard >= self._lease_seconds
        ]
        for name in silent:
            self._evaluations.worker_lost(name)
        if returned or silent:
            self.retry(now)

    def send_map(self) -> None:
        """To all workers, if it has changed."""
        if not self._workers:
            return
        new = self._coordinator.map
        if new.version != self._sent_version:
            self._sent_version = new.version
            for worker in self._workers.values():
                send_control(worker.connection, NewMap(new))

    def status(self, now: float) -> tuple[PsWorkerStatus, ...]:
        return tuple(
            PsWorkerStatus(
                name=worker.name,
                samples=worker.samples,
                samples_per_second=self._coordinator.queues.rate(worker.name),
                silent_seconds=now - worker.heard,
            )
            for worker in self._workers.values()
        )

    # Answers.

    def _try(self, worker: _Worker, data: bytes, now: float) -> bool:
        """Answer a worker's request, if possible. Returns whether others may be answered now."""
        request = worker.waiting
        assert request is not None
        try:
            match request:
                case NextShard():
                    return self._next_shard(worker, request, now)
                case ReportShard():
                    return self._report(worker, request, now)
                case EvaluateNext():
                    return self._evaluate(worker, request)
                case EvaluateReport():
                    self._evaluations.report(request.key, range(request.start, request.stop), data)
                    self._answer(worker, self._plain(worker))
                    return True
                case EvaluateResults():
                    if not self._evaluations.knows(request.key):
                        raise UsageError(f"there are no results of {request.key}")
                    results = self._evaluations.results(request.key)
                    lengths = tuple(map(len, results))
                    answer = Answered(request.number, self.progress(worker.name), results=lengths)
                    self._answer(worker, answer, b"".join(results))
                case SaveJob():
                    if self._coordinator.checkpoint.number >= worker.save_number:
                        self._answer(worker, self._plain(worker))
                    else:
                        self.checkpoint_wanted = True
                case CloseWorker():
                    self._coordinator.answer(LeaveShards(worker.name), now)
                    self._answer(worker, self._plain(worker))
                    return True
                case _:
                    raise AssertionError(request)
        except GyrostatError as error:
            self._answer(worker, RequestRefused(getattr(request, "number", 0), str(error)))
        return False

    def _next_shard(self, worker: _Worker, request: NextShard, now: float) -> bool:
        queues = self._coordinator.queues
        if self._evaluations.under_way and request.epoch > queues.epoch:
            return False
        match self._coordinator.answer(AskShard(worker.name, request.epoch), now):
            case Shard() as shard:
                self._held[worker.name] = shard
                for old in list(self._held)[:-_MOST_HELD]:
                    del self._held[old]
                self._answer(worker, Answered(request.number, self.progress(worker.name), shard=shard))
            case EpochOver(epoch=epoch):
                if self._is_saved(epoch):
                    self._answer(
                        worker, Answered(request.number, self.progress(worker.name), epoch_over=True)
                    )
                else:
                    self.checkpoint_wanted = True
        return False

    def _report(self, worker: _Worker, request: ReportShard, now: float) -> bool:
        report = ShardReport(worker.name, request.term, ((request.lease, request.samples),))
        verdict = self._coordinator.answer(report, now)
        assert isinstance(verdict, ReportVerdict)
        if not verdict.accepted:
            self._answer(worker, RequestRefused(request.number, verdict.reason, term_over=True))
            return False
        worker.samples += request.samples
        held = self._held.get(worker.name)
        if held is not None and (held.lease, len(held)) == (request.lease, request.samples):
            del self._held[worker.name]
        self._answer(worker, self._plain(worker))
        return True

    def _evaluate(self, worker: _Worker, request: EvaluateNext) -> bool:
        key = request.key
        if not self._evaluations.knows(key) and key.epoch >= 0 and not self._is_saved(key.epoch):
            self.checkpoint_wanted = True
            return False
        if request.items > _MOST_PARTS * request.part_size:
            raise UsageError(f"an evaluation of {request.items} samples in parts of {request.part_size}")
        part = self._evaluations.next_part(worker.name, key, request.items, request.part_size)
        if part is PartState.COMPLETE:
            self._answer(worker, self._plain(worker))
        elif isinstance(part, range):
            progress = self.progress(worker.name)
            self._answer(worker, Answered(request.number, progress, part=(part.start, part.stop)))
        return False

    def _is_saved(self, epoch: int) -> bool:
        """Whether the last checkpoint has all of this epoch."""
        checkpoint = self._coordinator.checkpoint
        queues = checkpoint.queues
        over = queues["todo"] == 0 and not queues["doing"]
        return checkpoint.epoch > epoch or (checkpoint.epoch == epoch and over)

    def _plain(self, worker: _Worker) -> Answered:
        return Answered(getattr(worker.waiting, "number", 0), self.progress(worker.name))

    def _answer(self, worker: _Worker, answer: Answered | RequestRefused, data: bytes = b"") -> None:
        worker.waiting = None
        send_control(worker.connection, answer, data)

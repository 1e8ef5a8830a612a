"""`LocalServers`: one server, the shard queues and evaluations in this process: a plain `python train.py`.

The machines are those of a job with server processes (`SlotServer`, `ServerCoordinator`); only their messages are delivered
by calls. Nothing is lost here but the whole process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from pathlib import Path

import numpy as np

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.core.files import make_directory
from gyrostat.core.logs import note
from gyrostat.data.shards.messages import AskShard, EpochOver, LeaveShards, ReportVerdict, Shard, ShardReport
from gyrostat.ps.checkpoint.checkpoint_files import (
    FORMAT,
    CheckpointFiles,
    FoundCheckpoint,
    PsManifest,
    check_same_job,
    slot_file_name,
)
from gyrostat.ps.checkpoint.slot_files import read_slot, write_slot
from gyrostat.ps.client.port import DataSpec, Pull, PulledValues, WholeUpdate, WorkerProgress
from gyrostat.ps.protocol.coordinator import (
    Instruction,
    SendToServer,
    ServerCoordinator,
    ServerRecovery,
    WriteManifest,
)
from gyrostat.ps.protocol.evaluation import EvaluationKey, Evaluations, PartState
from gyrostat.ps.protocol.exchange import BatchRange, Exchange, ExchangeReply, ExchangeStatus
from gyrostat.ps.protocol.slot_server import (
    Action,
    AnswerCaller,
    ReadSlots,
    SlotServer,
    ToCoordinator,
    WriteSlot,
)
from gyrostat.ps.store.hashing import Rows
from gyrostat.ps.store.ledger import Flags
from gyrostat.ps.store.slot_state import job_digest
from gyrostat.ps.store.slot_store import Update
from gyrostat.ps.store.spec import StoreSpec

_ME = "this process"
_NOW = 0.0  # there is nobody to wait for


class LocalServers:
    """Servers of one worker, in its process."""

    def __init__(self, directory: Path | None = None, every: int = 0) -> None:
        """`directory`: of checkpoints, one after every so many updates, and one at the end."""
        self._opened: _Opened | None = None
        self._evaluations = Evaluations()
        self._files, self._every = None, every
        self._found = FoundCheckpoint(None, None, ())
        if directory is not None:
            make_directory(directory, "checkpoint_dir")
            self._files = CheckpointFiles(directory, keep=2)
            self._found = self._files.newest()
            for reason in self._found.refused:
                note(reason)
            if self._found.path is not None:
                note(f"resumed from {self._found.path}")

    @property
    def progress(self) -> WorkerProgress:
        if self._opened is None:
            manifest = self._found.manifest
            return WorkerProgress() if manifest is None else WorkerProgress(epoch=manifest.checkpoint.epoch)
        return self._opened.progress

    def open(self, spec: StoreSpec, data: DataSpec) -> None:
        if self._opened is not None:
            raise Misuse("a job's servers were opened twice")
        self._opened = _Opened(spec, data, self._files, self._found.manifest)
        self._saved = self.progress.updates

    def begin_dense(self, values: Mapping[int, Rows]) -> None:
        opened = self._open
        opened.request(Exchange(opened.term, opened.slots, begin_dense=values))

    def exchange(self, push: WholeUpdate | None, pull: Pull) -> PulledValues:
        opened = self._open
        update = None
        if push is not None:
            batch = push.batch
            update = Update(batch.epoch, batch.number, opened.slots, push.rows, push.dense, push.origin)
        committed = opened.coordinator.committed
        exchange = Exchange(opened.term, opened.slots, update, pull.rows, pull.dense, committed=committed)
        reply = opened.request(exchange)
        return PulledValues(reply.rows, reply.dense, reply.duplicates, reply.versions)

    def which_applied(self, batches: BatchRange) -> Flags:
        opened = self._open
        return opened.request(Exchange(opened.term, opened.slots, which_applied=batches)).applied

    def next_shard(self, epoch: int) -> Shard | EpochOver:
        answer = self._open.coordinator.answer(AskShard(_ME, epoch), _NOW)
        assert isinstance(answer, Shard | EpochOver), answer  # nobody else holds shards
        return answer

    def report(self, shard: Shard, samples: int) -> None:
        report = ShardReport(_ME, shard.term, ((shard.lease, samples),))
        verdict = self._open.coordinator.answer(report, _NOW)
        assert isinstance(verdict, ReportVerdict)
        assert verdict.accepted, verdict.reason
        if self._every and self.progress.updates >= self._saved + self._every:
            self.save()

    def evaluate_next(self, key: EvaluationKey, items: int, part_size: int) -> range | None:
        part = self._evaluations.next_part(_ME, key, items, part_size)
        assert part is not PartState.WAIT
        return part if isinstance(part, range) else None

    def evaluate_report(self, key: EvaluationKey, part: range, result: bytes) -> None:
        self._evaluations.report(key, part, result)

    def evaluate_results(self, key: EvaluationKey) -> list[bytes]:
        return self._evaluations.results(key)

    def save(self) -> None:
        if self._files is None:
            raise UsageError(
                "there is nowhere to save to; give gyrostat.init(checkpoint_dir=…), or under gyrostat run --checkpoint-dir DIR"
            )
        self._open.save()
        self._saved = self.progress.updates

    def log(self, metrics: Mapping[str, float]) -> None:
        """The worker's supervisor shows them."""

    def digest(self) -> str:
        opened = self._open
        store = opened.server.store
        store.commit(opened.slots, opened.coordinator.committed)
        return job_digest(store.to_state(slot).content_digest for slot in opened.slots.tolist())

    def close(self) -> None:
        if self._opened is not None:
            self._opened.coordinator.answer(LeaveShards(_ME), _NOW)
            if self._files is not None:
                self.save()

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise Misuse("the job's servers are not open yet; they are from the first loop on")
        return self._opened


class _Opened:
    """A server with all slots, and its coordinator."""

    def __init__(
        self, spec: StoreSpec, data: DataSpec, files: CheckpointFiles | None, found: PsManifest | None
    ) -> None:
        self.server = SlotServer(spec)
        self._spec, self._data, self._files = spec, data, files
        queues = data.queues(inf)
        if found is not None and files is not None:
            check_same_job(found, spec, data, files.directory)
            queues.roll_back(found.checkpoint.queues, term=1, now=_NOW)
        self.coordinator = ServerCoordinator(
            spec.slots,
            queues,
            ServerRecovery.EXACT,
            order=spec.order,
            checkpoint=None if found is None else found.checkpoint,
            first_checkpoint=1 if files is None else files.highest() + 1,
        )
        self.slots = np.arange(spec.slots)
        self._batch_size, self._batches = data.batch_size, -(-data.samples // data.batch_size)
        self._follow(self.coordinator.server_joined(_ME, ("", 0)))

    @property
    def term(self) -> int:
        return self.coordinator.queues.term

    @property
    def progress(self) -> WorkerProgress:
        queues = self.coordinator.queues
        updates = queues.epoch * self._batches + -(-queues.done // self._batch_size)
        return WorkerProgress(updates, queues.epoch, self.coordinator.committed)

    def save(self) -> None:
        """A checkpoint, on disk when this returns."""
        self._follow(self.coordinator.checkpoint_due())

    def request(self, exchange: Exchange) -> ExchangeReply:
        (action,) = self.server.request(None, exchange)
        assert isinstance(action, AnswerCaller)
        assert action.reply.status is ExchangeStatus.DONE, action.reply.status
        return action.reply

    def _follow(self, instructions: list[Instruction]) -> None:
        """Deliver messages of coordinator and server until none is left."""
        left: deque[Instruction] = deque(instructions)
        while left:
            instruction = left.popleft()
            if isinstance(instruction, WriteManifest):
                assert self._files is not None
                checkpoint = instruction.checkpoint
                self._files.write(
                    PsManifest(format=FORMAT, spec=self._spec, data=self._data, checkpoint=checkpoint)
                )
                left += self.coordinator.manifest_written(checkpoint)
            else:
                assert isinstance(instruction, SendToServer), instruction
                for action in self.server.control(instruction.message):
                    left += self._acted(action)

    def _acted(self, action: Action) -> list[Instruction]:
        if isinstance(action, ToCoordinator):
            return self.coordinator.message(_ME, action.message)
        assert self._files is not None
        directory = self._files.directory
        if isinstance(action, WriteSlot):
            name = slot_file_name(action.checkpoint, action.state.slot, "local")
            write_slot(directory / name, action.state)
            after = self.server.written(action.checkpoint, action.state.slot, name)
        else:
            assert isinstance(action, ReadSlots), action
            states = [read_slot(directory / file) for file in action.files.values()]
            after = self.server.loaded(action.term, states)
        return [instruction for each in after for instruction in self._acted(each)]

"""`ReplayServers`: a recorded asynchronous job, repeated in one process with equal bits.

The batches are computed one after the other, in an order in which every batch comes after those whose updates it has seen. Each
pull gets the rows as they were at the recorded line and version of their slot (`slot_lines.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.data.shards.messages import EpochOver, Shard
from gyrostat.ps.checkpoint.record import UpdateRecord
from gyrostat.ps.client.port import DataSpec, Pull, PulledValues, WholeUpdate, WorkerProgress
from gyrostat.ps.client.slot_lines import SlotLines, causal_order
from gyrostat.ps.protocol.evaluation import EvaluationKey, Evaluations
from gyrostat.ps.protocol.exchange import BatchRange
from gyrostat.ps.protocol.record_lines import line_and_version
from gyrostat.ps.store.hashing import Rows
from gyrostat.ps.store.ledger import Flags
from gyrostat.ps.store.spec import StoreSpec

_ME = "this process"
_FORGET_EVERY = 64


class ReplayServers:
    """Implements `ParameterServers` from a record."""

    def __init__(self, record: UpdateRecord) -> None:
        self._record = record
        self._pulls_of = [
            [np.frombuffer(each, np.int64) for each in one.pulls] for one in record.computations
        ]
        self._lines: SlotLines | None = None
        self._order = deque(causal_order(record))
        self._needed = self._needed_later()
        self._current: int | None = None
        self._pulls = self._computed = self._epoch = 0
        self._evaluations = Evaluations()

    @property
    def progress(self) -> WorkerProgress:
        return WorkerProgress(self._computed, self._epoch)

    def open(self, spec: StoreSpec, data: DataSpec) -> None:
        for what, recorded, given in (
            ("parameters", self._record.spec, spec),
            ("data", self._record.data, data),
        ):
            if recorded != given:
                raise UsageError(
                    f"the record is of a job with other {what}: {recorded}, and the script has {given}; replay it with the "
                    "script and arguments that it was recorded with"
                )

    def begin_dense(self, values: Mapping[int, Rows]) -> None:
        self._lines = SlotLines(self._record, values)

    def exchange(self, push: WholeUpdate | None, pull: Pull) -> PulledValues:
        lines = self._open
        if push is not None:
            assert self._current is not None
            lines.computed(self._current, push)
        if not pull.rows and not pull.dense:
            return PulledValues({}, {})
        if self._current is None:  # an evaluation: of all that has been computed
            states = lines.newest()
        else:
            if self._pulls >= len(self._pulls_of[self._current]):
                raise Misuse("the script pulls more often than when it was recorded; replay the same script")
            states = self._pulls_of[self._current][self._pulls]
            self._pulls += 1
        return PulledValues(
            {table: lines.pull(table, keys, states) for table, keys in pull.rows.items()},
            {tensor: lines.pull_dense(tensor, states) for tensor in pull.dense},
            versions=states,
        )

    def which_applied(self, batches: BatchRange) -> Flags:
        return np.zeros(batches.count, bool)

    def next_shard(self, epoch: int) -> Shard | EpochOver:
        self._epoch = epoch
        computations, data = self._record.computations, self._record.data
        if not self._order or computations[self._order[0]].epoch > epoch:
            return EpochOver(epoch)
        self._current, self._pulls = self._order.popleft(), 0
        one = computations[self._current]
        start = one.batch * data.batch_size
        return Shard(self._current, 0, one.epoch, None, start, min(start + data.batch_size, data.samples))

    def report(self, shard: Shard, samples: int) -> None:
        self._current = None
        self._computed += 1
        if self._computed in self._needed:
            self._open.forget(self._needed.pop(self._computed))

    def evaluate_next(self, key: EvaluationKey, items: int, part_size: int) -> range | None:
        part = self._evaluations.next_part(_ME, key, items, part_size)
        return part if isinstance(part, range) else None

    def evaluate_report(self, key: EvaluationKey, part: range, result: bytes) -> None:
        self._evaluations.report(key, part, result)

    def evaluate_results(self, key: EvaluationKey) -> list[bytes]:
        return self._evaluations.results(key)

    def save(self) -> None:
        """A replay writes no checkpoints."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """The supervisor shows them."""

    def digest(self) -> str:
        return self._open.digest()

    def close(self) -> None:
        """Nobody else is concerned."""

    def _needed_later(self) -> dict[int, dict[tuple[int, int], int]]:
        """After every so many batches: by slot and line, the least version that later ones pull."""
        least: dict[tuple[int, int], int] = {}
        found = {}
        for done in reversed(range(len(self._order))):
            for states in self._pulls_of[self._order[done]]:
                for slot, state in enumerate(states.tolist()):
                    name, version = line_and_version(state)
                    least[slot, name] = min(version, least.get((slot, name), version))
            if done % _FORGET_EVERY == 0:
                found[done] = dict(least)
        return found

    @property
    def left(self) -> int:
        """Recorded batches that have not been computed."""
        return len(self._order)

    @property
    def _open(self) -> SlotLines:
        if self._lines is None:
            raise Misuse("the job's servers are not open yet; they are from the first loop on")
        return self._lines


class _Replaying:
    servers: ReplayServers | None = None


def replay_with(servers: ReplayServers | None) -> None:
    """From now on `gyrostat.servers` uses these servers."""
    _Replaying.servers = servers


def replaying() -> ReplayServers | None:
    return _Replaying.servers

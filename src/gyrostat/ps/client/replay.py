"""`ReplayServers`: a recorded asynchronous job, repeated in one process with equal bits.

The batches are computed one after the other, in an order in which every batch comes after those whose updates it has seen. Each
pull gets the rows as they were at the recorded versions: a slot keeps what its latest updates have overwritten, for pulls
that are computed later and saw less. Slots apply updates in their recorded order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.data.shards.messages import EpochOver, Shard
from gyrostat.ps.checkpoint.record import AsyncRecord
from gyrostat.ps.client.port import DataSpec, Pull, PulledValues, WholeUpdate, WorkerProgress
from gyrostat.ps.protocol.evaluation import EvaluationKey, Evaluations
from gyrostat.ps.protocol.exchange import BatchRange
from gyrostat.ps.store.hashing import Keys, Rows, slots_of
from gyrostat.ps.store.ledger import Flags, Slots, Versions
from gyrostat.ps.store.slot_state import job_digest
from gyrostat.ps.store.slot_store import SlotStore, Update
from gyrostat.ps.store.spec import StoreSpec

_ME = "this process"


@dataclass(frozen=True)
class _Overwritten:
    """What one update of a slot has overwritten."""

    version: int
    """Before the update."""
    rows: dict[int, tuple[Keys, Rows]]
    dense: dict[int, Rows]


class VersionedSlots:
    """A store whose slots can be read as they were, as far back as somebody still needs."""

    def __init__(self, spec: StoreSpec) -> None:
        self.store = SlotStore(spec)
        self.store.own(range(spec.slots))
        self._spec = spec
        self._past: list[deque[_Overwritten]] = [deque() for _ in range(spec.slots)]

    @property
    def versions(self) -> Versions:
        return self.store.ledger.versions

    def apply(self, slots: Slots, update: WholeUpdate) -> None:
        """In these slots."""
        owners = {table: slots_of(keys, self._spec.slots) for table, (keys, _) in update.rows.items()}
        for slot in slots.tolist():
            here = np.array([slot])
            rows = {}
            for table, (keys, _) in update.rows.items():
                mine = keys[owners[table] == slot]
                rows[table] = mine, self.store.pull(table, mine)
            for table, spec in enumerate(self._spec.tables):
                if spec.expire_after and (int(self.versions[slot]) + 1) % spec.expire_after == 0:
                    every = self.store.to_state(slot).arrays[f"table.{spec.name}.keys"]
                    rows[table] = every, self.store.pull(table, every)
            dense = {tensor: self.store.pull_dense(tensor, here) for tensor in update.dense}
            self._past[slot].append(_Overwritten(int(self.versions[slot]), rows, dense))
        pieces = {tensor: values[slots] for tensor, values in update.dense.items()}
        self.store.apply(Update(update.batch.epoch, update.batch.number, slots, update.rows, pieces))

    def pull(self, table: int, keys: Keys, versions: Versions) -> Rows:
        """Rows of distinct ascending keys, at these versions of their slots."""
        rows = self.store.pull(table, keys)
        owners = slots_of(keys, self._spec.slots)
        for slot in np.unique(owners).tolist():
            for past in reversed(self._past[slot]):
                if past.version < versions[slot]:
                    break
                old_keys, old_rows = past.rows.get(table, (keys[:0], rows[:0]))
                if len(old_keys):
                    places = np.searchsorted(keys, old_keys)
                    found = places < len(keys)
                    found[found] = keys[places[found]] == old_keys[found]
                    rows[places[found]] = old_rows[found]
        return rows

    def pull_dense(self, tensor: int, versions: Versions) -> Rows:
        values = self.store.pull_dense(tensor, np.arange(self._spec.slots))
        for slot, pasts in enumerate(self._past):
            for past in reversed(pasts):
                if past.version < versions[slot]:
                    break
                if tensor in past.dense:
                    values[slot] = past.dense[tensor][0]
        return values

    def forget(self, needed: Versions) -> None:
        """Nobody will read a slot at an earlier version than this."""
        for slot, pasts in enumerate(self._past):
            while pasts and pasts[0].version < needed[slot]:
                pasts.popleft()


class ReplayServers:
    """Implements `ParameterServers` from a record."""

    def __init__(self, record: AsyncRecord) -> None:
        self._record = record
        self._order = deque(causal_order(record))
        self._batches_left = [len(each) for each in record.history]
        self._versions = [
            [np.frombuffer(each, np.int64) for each in one.pulls] for one in record.computations
        ]
        self._needed = self._needed_later()
        self._gradients: dict[int, WholeUpdate] = {}
        self._uses = [0] * len(record.computations)
        for slot in record.history:
            for number in slot:
                self._uses[number] += 1
        self._applied = [0] * record.spec.slots
        self._slots: VersionedSlots | None = None
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
        self._slots = VersionedSlots(spec)

    def begin_dense(self, values: Mapping[int, Rows]) -> None:
        store = self._open.store
        for tensor, each in values.items():
            store.begin_dense(tensor, np.arange(self._record.spec.slots), each)

    def exchange(self, push: WholeUpdate | None, pull: Pull) -> PulledValues:
        slots = self._open
        if push is not None:
            assert self._current is not None
            self._gradients[self._current] = push
        if not pull.rows and not pull.dense:
            return PulledValues({}, {})
        if self._current is None:  # an evaluation: of all that has been computed
            self._advance(np.array([len(each) for each in self._record.history]))
            versions = slots.versions.copy()
        else:
            if self._pulls >= len(self._versions[self._current]):
                raise Misuse("the script pulls more often than when it was recorded; replay the same script")
            versions = self._versions[self._current][self._pulls]
            self._pulls += 1
            self._advance(versions)
        return PulledValues(
            {table: slots.pull(table, keys, versions) for table, keys in pull.rows.items()},
            {tensor: slots.pull_dense(tensor, versions) for tensor in pull.dense},
            versions=versions,
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
        self._open.forget(self._needed[self._computed])

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
        self._advance(np.array([len(each) for each in self._record.history]))
        store = self._open.store
        return job_digest(store.to_state(slot).content_digest for slot in range(self._record.spec.slots))

    def close(self) -> None:
        """Nobody else is concerned."""

    @property
    def left(self) -> int:
        """Recorded batches that have not been computed."""
        return len(self._order)

    @property
    def _open(self) -> VersionedSlots:
        if self._slots is None:
            raise Misuse("the job's servers are not open yet; they are from the first loop on")
        return self._slots

    def _advance(self, versions: Versions) -> None:
        """Apply recorded updates until every slot has reached its version, as far as they are computed."""
        while True:
            ready: dict[int, list[int]] = {}
            for slot, done in enumerate(self._applied):
                if done < min(int(versions[slot]), len(self._record.history[slot])):
                    number = self._record.history[slot][done]
                    if number in self._gradients:
                        ready.setdefault(number, []).append(slot)
            if not ready:
                return
            for number, slots in ready.items():
                self._open.apply(np.array(slots), self._gradients[number])
                for slot in slots:
                    self._applied[slot] += 1
                self._uses[number] -= len(slots)
                if not self._uses[number]:
                    del self._gradients[number]

    def _needed_later(self) -> list[Versions]:
        """By number of computed batches: the least versions that those after them pull."""
        least = np.full(self._record.spec.slots, np.iinfo(np.int64).max)
        found = [least]
        for number in reversed(self._order):
            for versions in self._versions[number]:
                least = np.minimum(least, versions)
            found.append(least)
        return found[::-1]


def causal_order(record: AsyncRecord) -> list[int]:
    """All computations, each after those whose updates it has seen; epochs one after the other."""
    seen = [
        np.max([np.frombuffer(each, np.int64) for each in one.pulls], axis=0) for one in record.computations
    ]
    computed = np.zeros(len(record.computations), bool)
    reached = np.zeros(record.spec.slots, np.int64)
    order: list[int] = []
    left = sorted(
        range(len(seen)), key=lambda number: (record.computations[number].epoch, int(seen[number].sum()))
    )
    while left:
        later = []
        for number in left:
            if (seen[number] > reached).any():
                later.append(number)
                continue
            computed[number] = True
            order.append(number)
            for slot, history in enumerate(record.history):
                while reached[slot] < len(history) and computed[history[reached[slot]]]:
                    reached[slot] += 1
        if len(later) == len(left):
            raise UsageError(
                "the record contradicts itself: some batches have seen updates that come after them"
            )
        left = later
    return order


class _Replaying:
    servers: ReplayServers | None = None


def replay_with(servers: ReplayServers | None) -> None:
    """From now on `gyrostat.servers` uses these servers."""
    _Replaying.servers = servers


def replaying() -> ReplayServers | None:
    return _Replaying.servers

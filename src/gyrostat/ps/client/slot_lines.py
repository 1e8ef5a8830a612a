"""The states that the slots of a recorded job went through: lines of updates (`protocol/record_lines.py`), applied as needed.

Every line has a store of its own, which begins with the state of the line before it at the version where it begins. A line
keeps what its updates have overwritten, for pulls that are repeated later and saw an earlier version.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gyrostat.core.errors import UsageError
from gyrostat.ps.checkpoint.record import UpdateLine, UpdateRecord
from gyrostat.ps.client.port import WholeUpdate
from gyrostat.ps.protocol.record_lines import line_and_version
from gyrostat.ps.store.hashing import Keys, Rows, slots_of
from gyrostat.ps.store.ledger import Versions
from gyrostat.ps.store.slot_state import SlotState, job_digest
from gyrostat.ps.store.slot_store import SlotStore, Update
from gyrostat.ps.store.spec import StoreSpec


@dataclass(frozen=True)
class _Overwritten:
    """What one update of a slot has overwritten."""

    version: int
    """Before the update."""
    rows: dict[int, tuple[Keys, Rows]]
    dense: dict[int, Rows]


class _Line:
    """The state of a slot along one line."""

    def __init__(self, spec: StoreSpec, line: UpdateLine, before: SlotState | Mapping[int, Rows]) -> None:
        """`before`: the state that it begins with; of a new slot, all dense values."""
        self._spec, self._slot = spec, np.array([line.slot])
        self.store = SlotStore(spec)
        if isinstance(before, SlotState):
            self.store.restore(before)
        else:
            self.store.own([line.slot])
            for tensor, values in before.items():
                self.store.begin_dense(tensor, self._slot, values[self._slot])
        self.line, self.version = line, line.start
        self._past: deque[_Overwritten] = deque()

    @property
    def next_update(self) -> int | None:
        """The computation whose update comes next."""
        done = self.version - self.line.start
        return self.line.updates[done] if done < len(self.line.updates) else None

    def apply(self, update: WholeUpdate) -> None:
        slot = int(self._slot[0])
        mine: dict[int, tuple[Keys, Rows]] = {}
        old: dict[int, tuple[Keys, Rows]] = {}
        for table, (keys, gradients) in update.rows.items():
            here = slots_of(keys, self._spec.slots) == slot
            mine[table] = keys[here], gradients[here]
            old[table] = keys[here], self.store.pull(table, keys[here])
        for table, spec in enumerate(self._spec.tables):
            if spec.expire_after and (self.version + 1) % spec.expire_after == 0:
                every = self.store.to_state(slot).arrays[f"table.{spec.name}.keys"]
                old[table] = every, self.store.pull(table, every)
        dense = {tensor: self.store.pull_dense(tensor, self._slot) for tensor in update.dense}
        self._past.append(_Overwritten(self.version, old, dense))
        pieces = {tensor: values[self._slot] for tensor, values in update.dense.items()}
        self.store.apply(Update(update.batch.epoch, update.batch.number, self._slot, mine, pieces))
        self.version += 1

    def pull(self, table: int, keys: Keys, version: int) -> Rows:
        """Rows of distinct ascending keys of this slot."""
        rows = self.store.pull(table, keys)
        for past in reversed(self._past):
            if past.version < version:
                break
            old_keys, old_rows = past.rows.get(table, (keys[:0], rows[:0]))
            places = np.searchsorted(keys, old_keys)
            found = places < len(keys)
            found[found] = keys[places[found]] == old_keys[found]
            rows[places[found]] = old_rows[found]
        return rows

    def forget(self, version: int) -> None:
        """What is needed only for earlier versions."""
        while self._past and self._past[0].version < version:
            self._past.popleft()

    def pull_dense(self, tensor: int, version: int) -> Rows:
        values = self.store.pull_dense(tensor, self._slot)
        for past in reversed(self._past):
            if past.version < version:
                break
            values = past.dense.get(tensor, values)
        return values


class SlotLines:
    """All slots of a recorded job."""

    def __init__(self, record: UpdateRecord, dense: Mapping[int, Rows]) -> None:
        """`dense`: initial values."""
        self._spec, self._dense = record.spec, dense
        self._parents = parents_of(record)
        self._records = {(line.slot, line.name): line for line in record.lines}
        self._lines: dict[tuple[int, int], _Line] = {}
        self._starts: dict[tuple[int, int], SlotState] = {}
        """Of lines that have not begun: the state that they begin with."""
        self._gradients: dict[int, WholeUpdate] = {}
        self._uses = Counter(number for line in record.lines for number in line.updates)

    def computed(self, number: int, update: WholeUpdate) -> None:
        """The gradients of a computation are known."""
        self._gradients[number] = update

    def pull(self, table: int, keys: Keys, states: Versions) -> Rows:
        """Rows of distinct ascending keys, each from the state of its slot."""
        owners = slots_of(keys, self._spec.slots)
        rows = np.zeros((len(keys), self._spec.tables[table].width), np.float32)
        for slot in np.unique(owners).tolist():
            name, version = line_and_version(int(states[slot]))
            mine = owners == slot
            rows[mine] = self._at(slot, name, version).pull(table, keys[mine], version)
        return rows

    def pull_dense(self, tensor: int, states: Versions) -> Rows:
        found = []
        for slot in range(self._spec.slots):
            name, version = line_and_version(int(states[slot]))
            found.append(self._at(slot, name, version).pull_dense(tensor, version))
        return np.concatenate(found)

    def forget(self, needed: Mapping[tuple[int, int], int]) -> None:
        """Nobody will read a line at an earlier version than this; lines that are not named are not read any more."""
        for key, line in self._lines.items():
            line.forget(needed.get(key, line.version))

    def newest(self) -> Versions:
        """The state of every slot after all that has been computed."""
        states = np.zeros(self._spec.slots, np.int64)
        for slot, name in sorted(self._records):
            if self._reach(slot, name, None):
                states[slot] = name + self._lines[slot, name].version
        return states

    def digest(self) -> str:
        states = self.newest()
        lines = [
            self._lines[slot, line_and_version(int(states[slot]))[0]] for slot in range(self._spec.slots)
        ]
        return job_digest(line.store.to_state(slot).content_digest for slot, line in enumerate(lines))

    def _at(self, slot: int, name: int, version: int) -> _Line:
        if (slot, name) not in self._records or not self._reach(slot, name, version):
            raise UsageError(
                f"the record contradicts itself: nobody has computed version {version} of slot {slot}"
            )
        return self._lines[slot, name]

    def _reach(self, slot: int, name: int, version: int | None) -> bool:
        """Advance a line to this version, or as far as possible. False: its beginning or that version cannot be reached."""
        key = slot, name
        if key not in self._lines:
            record = self._records[key]
            parent = self._parents[key]
            if parent is None:
                self._lines[key] = _Line(self._spec, record, self._dense)
            else:
                if key not in self._starts and not self._reach(slot, parent, record.start):
                    return False
                if key not in self._starts:
                    return False
                self._lines[key] = _Line(self._spec, record, self._starts.pop(key))
        line = self._lines[key]
        self._keep_starts(line)
        while version is None or line.version < version:
            number = line.next_update
            if number is None or number not in self._gradients:
                break
            line.apply(self._gradients[number])
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._gradients[number]
            self._keep_starts(line)
        return version is None or line.version >= version

    def _keep_starts(self, line: _Line) -> None:
        """Copy the state for lines that begin here."""
        slot = line.line.slot
        for key, parent in self._parents.items():
            here = key[0] == slot and parent == line.line.name and self._records[key].start == line.version
            if here and key not in self._lines and key not in self._starts:
                self._starts[key] = line.store.to_state(slot)


def parents_of(record: UpdateRecord) -> dict[tuple[int, int], int | None]:
    """By slot and line: the line that it begins from; None: it begins as new."""
    found: dict[tuple[int, int], int | None] = {}
    for slot in range(record.spec.slots):
        path: list[UpdateLine] = []
        for line in (each for each in record.lines if each.slot == slot):
            # The line that was in force at that version: later ones were undone with what they had beyond it.
            while path and path[-1].start > line.start:
                path.pop()
            if not path and line.start > 0:
                raise UsageError(
                    f"the record begins in the middle: slot {slot} had applied {line.start} updates already. Record a run from "
                    "its start (--no-resume)"
                )
            found[slot, line.name] = path[-1].name if path and line.start > 0 else None
            path.append(line)
    return found


def causal_order(record: UpdateRecord) -> list[int]:
    """All computations, each after those whose updates it has seen; epochs one after the other."""
    parents = parents_of(record)
    lines = {(line.slot, line.name): line for line in record.lines}
    seen = [
        {(slot, int(state)) for each in one.pulls for slot, state in enumerate(np.frombuffer(each, np.int64))}
        for one in record.computations
    ]
    computed: set[int] = set()
    reached = dict.fromkeys(lines, 0)

    def known(slot: int, name: int, version: int) -> bool:
        line = lines.get((slot, name))
        if line is None or reached[slot, name] < version - line.start:
            return False
        parent = parents[slot, name]
        return parent is None or known(slot, parent, line.start)

    order: list[int] = []
    left = sorted(
        range(len(seen)),
        key=lambda number: (record.computations[number].epoch, sum(state for _, state in seen[number])),
    )
    by_first = {number: [] for number in range(len(seen))}  # type: dict[int, list[tuple[int, int]]]
    for key, line in lines.items():
        for number in line.updates:
            by_first[number].append(key)
    while left:
        later = []
        for number in left:
            if not all(known(slot, *line_and_version(state)) for slot, state in seen[number]):
                later.append(number)
                continue
            computed.add(number)
            order.append(number)
            for key in by_first[number]:
                updates = lines[key].updates
                while reached[key] < len(updates) and updates[reached[key]] in computed:
                    reached[key] += 1
        if len(later) == len(left):
            raise UsageError(
                "the record contradicts itself: some batches have seen updates that come after them"
            )
        left = later
    return order

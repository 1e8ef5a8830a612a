"""A dataset of its own for every rank and data worker, without copying the data.

In PyTorch each data worker of each rank has a copy of the dataset, made by forking, so a generator or a counter in the
dataset has as many independent states. Here one process stands in for data workers of several ranks, so each of them has a
`DatasetReplica`: a copy of the objects that dataset, `collate_fn` and `worker_init_fn` consist of, with their random
generators, plain values, and small lists, dicts, tensors and arrays. Large parts are shared, and so are those that cannot be
copied safely: open files, and objects that define how they are copied or closed. `object_copy.py` has the rules.

The state of a replica is a plain value: the dataset's `state_dict()` if it has one, else its differences from the dataset as
the script made it, usually none. It is committed with every batch, moves with the virtual worker, and is loaded into a
replica elsewhere. Shared parts do not belong to it: a cache may be shared, but nothing that decides bits.
"""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Iterable
from typing import Any

from gyrostat.data.object_copy import (
    MISSING,
    PLAIN,
    Path,
    bind,
    bindings,
    copy_of,
    equal,
    find,
    is_plain,
    leaf_state,
    parts_of,
    same_binding,
    set_leaf,
    state_leaves,
)

ReplicaState = dict[str, Any]
"""The state of a replica, as a plain value."""


class DatasetReplica:
    """Copies of objects that belong together, and their state."""

    def __init__(self, *originals: Any, keep: Iterable[Any] = ()) -> None:
        """Objects in `keep` are not copied, wherever they are referred to."""
        self._keep = {id(thing): thing for thing in keep}
        self._originals = list(originals)
        self._original_bindings = dict(bindings(self._originals))
        memo: dict[int, Any] = dict(self._keep)
        self.parts = [copy_of(original, memo) for original in originals]
        self._stateful = [has_state_dict(part) for part in self.parts]
        self._original_state = dict(state_leaves(self._without_stateful(list(originals))))
        self._changes_cache: tuple[_ChangeDetector, dict[Path, Any]] | None = None

    def state(self) -> ReplicaState | None:
        """The state; None if it is that of the originals."""
        states = {
            number: copy.deepcopy(part.state_dict())
            for number, (part, stateful) in enumerate(zip(self.parts, self._stateful, strict=True))
            if stateful
        }
        changes = self._changes()
        if not states and not changes:
            return None
        return {
            "state_dicts": states,
            "changes": [[list(map(list, path)), value] for path, value in changes.items()],
        }

    def load_state(self, state: ReplicaState | None) -> None:
        """Replace the state."""
        wanted: dict[Path, Any] = {}
        for path, value in state["changes"] if state else ():
            wanted[tuple((step[0], step[1]) for step in path)] = value
        for path in self._changes() | wanted:
            set_leaf(self.parts, path, wanted.get(path, self._original_state.get(path, MISSING)))
        for number, state_dict in (state["state_dicts"] if state else {}).items():
            self.parts[number].load_state_dict(copy.deepcopy(state_dict))

    def follow_originals(self) -> None:
        """Take over what the script has changed in the originals since the replica was made, or last followed them."""
        now = dict(bindings(self._originals))
        taken: list[Path] = []
        for path, value in now.items():
            known = path in self._original_bindings and same_binding(value, self._original_bindings[path])
            if not known and not _lies_below(path, taken):
                bind(self.parts, path, copy_of(value[0], dict(self._keep)))
                taken.append(path)
        for path in self._original_bindings.keys() - now.keys():
            if not _lies_below(path, taken):
                set_leaf(self.parts, path, MISSING)
        if taken or len(now) != len(self._original_bindings):
            self._original_bindings, self._changes_cache = now, None
            self._original_state = dict(state_leaves(self._without_stateful(self._originals)))

    def _changes(self) -> dict[Path, Any]:
        """Differences from the originals. Most datasets never change anything, which is quick to detect."""
        if self._changes_cache is None or self._changes_cache[0].changed():
            parts = self._without_stateful(self.parts)
            self._changes_cache = _ChangeDetector(parts), self._compare(parts)
        return self._changes_cache[1]

    def _compare(self, parts: list[Any]) -> dict[Path, Any]:
        now = dict(state_leaves(parts))
        changes = {
            path: value
            for path, value in now.items()
            if not equal(value, self._original_state.get(path, MISSING))
        }
        for path in self._original_state.keys() - now.keys():
            if find(self.parts, path) is MISSING:
                changes[path] = ["gone"]
        return changes

    def _without_stateful(self, parts: list[Any]) -> list[Any]:
        return [None if stateful else part for part, stateful in zip(parts, self._stateful, strict=True)]


def has_state_dict(thing: Any) -> bool:
    """Whether it can save where it is, and resume from there."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class _ChangeDetector:
    """Detects in microseconds whether anything has changed since it was made."""

    def __init__(self, root: Any) -> None:
        self._bindings: list[tuple[Any, list[Any], list[Any]]] = []
        """Containers with their keys and values. The values are kept alive, so that no other object gets their identity."""
        self._contents: list[tuple[Any, Any]] = []
        """Leaves that can be changed in place, with their state."""
        seen: set[int] = set()
        self._walk(root, seen)

    def _walk(self, value: Any, seen: set[int]) -> None:
        if type(value) in PLAIN or id(value) in seen:
            return
        seen.add(id(value))
        if (state := leaf_state(value)) is not None:
            self._contents.append((value, state))
            return
        parts = parts_of(value)
        if parts is None or type(value) is types.MethodType:
            for _, part in parts or ():
                self._walk(part, seen)
            return
        container = value if isinstance(value, (list, tuple, dict)) else vars(value)
        bound = list(container.values() if isinstance(container, dict) else container)
        self._bindings.append((container, list(container) if isinstance(container, dict) else [], bound))
        for part in bound:
            self._walk(part, seen)

    def changed(self) -> bool:
        for container, keys, bound in self._bindings:
            is_dict = isinstance(container, dict)
            now = container.values() if is_dict else container
            if len(now) != len(bound) or not all(map(operator.is_, now, bound)):
                return True
            if is_dict and list(container) != keys:
                return True
        for value, (kind, content) in self._contents:
            if kind == "plain":
                if not is_plain(value) or value != content:
                    return True
            elif not equal(leaf_state(value), [kind, content]):
                return True
        return False


def _lies_below(path: Path, others: list[Path]) -> bool:
    return any(path[: len(other)] == other for other in others)

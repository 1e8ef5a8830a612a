"""A dataset of its own for every rank and data worker, without copying the data.

In PyTorch each data worker of each rank has a copy of the dataset, made by forking: a generator or a counter that the
dataset keeps lives as many separate lives. Here one process stands in for data workers of several ranks, so each gets a
`DatasetReplica`: the objects that dataset, `collate_fn` and `worker_init_fn` are made of are copied, together with their random
generators, plain values, and small lists, dicts, tensors and arrays; all that is large is shared, and so
is what cannot be copied safely: open files, objects that say themselves how they are copied or closed. `anatomy.py` has the
rules.

What a twin holds is told as a plain value: its `state_dict()` if the dataset offers that, else what differs from the
dataset as the script made it. Usually that is nothing. It is committed with every batch, moves with the virtual worker,
and is put into another twin elsewhere. What is shared is not part of it: a cache may be; what decides bits must not.
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
    copied,
    find,
    is_plain,
    is_same,
    parts_of,
    put,
    same,
    tell,
    told,
)

Held = dict[str, Any]
"""What a twin holds, as a plain value."""


class DatasetReplica:
    """Copies of objects that belong together, and what they hold."""

    def __init__(self, *originals: Any, keep: Iterable[Any] = ()) -> None:
        """Whatever is in `keep` is not copied, wherever it turns up."""
        self._keep = {id(thing): thing for thing in keep}
        self._originals = list(originals)
        self._followed = dict(bindings(self._originals))
        memo: dict[int, Any] = dict(self._keep)
        self.parts = [copied(original, memo) for original in originals]
        self._stateful = [offers_state(part) for part in self.parts]
        self._pristine = dict(told(self._without_stateful(list(originals))))
        self._known: tuple[_Watch, dict[Path, Any]] | None = None

    def held(self) -> Held | None:
        """What they hold, as a plain value; None if it is what the originals hold."""
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

    def hold(self, held: Held | None) -> None:
        """Hold what `held` says, whatever was held before."""
        wanted: dict[Path, Any] = {}
        for path, value in held["changes"] if held else ():
            wanted[tuple((step[0], step[1]) for step in path)] = value
        for path in self._changes() | wanted:
            put(self.parts, path, wanted.get(path, self._pristine.get(path, MISSING)))
        for number, state in (held["state_dicts"] if held else {}).items():
            self.parts[number].load_state_dict(copy.deepcopy(state))

    def follow(self) -> None:
        """Take over what the script has changed in the originals since the twin was made, or followed them last."""
        now = dict(bindings(self._originals))
        taken: list[Path] = []
        for path, value in now.items():
            known = path in self._followed and is_same(value, self._followed[path])
            if not known and not _lies_below(path, taken):
                bind(self.parts, path, copied(value[0], dict(self._keep)))
                taken.append(path)
        for path in self._followed.keys() - now.keys():
            if not _lies_below(path, taken):
                put(self.parts, path, MISSING)
        if taken or len(now) != len(self._followed):
            self._followed, self._known = now, None
            self._pristine = dict(told(self._without_stateful(self._originals)))

    def _changes(self) -> dict[Path, Any]:
        """What differs from the originals. Most datasets never change anything: then it is enough to see that."""
        if self._known is None or self._known[0].changed():
            parts = self._without_stateful(self.parts)
            self._known = _Watch(parts), self._compare(parts)
        return self._known[1]

    def _compare(self, parts: list[Any]) -> dict[Path, Any]:
        now = dict(told(parts))
        changes = {
            path: value for path, value in now.items() if not same(value, self._pristine.get(path, MISSING))
        }
        for path in self._pristine.keys() - now.keys():
            if find(self.parts, path) is MISSING:
                changes[path] = ["gone"]
        return changes

    def _without_stateful(self, parts: list[Any]) -> list[Any]:
        return [None if stateful else part for part, stateful in zip(parts, self._stateful, strict=True)]


def offers_state(thing: Any) -> bool:
    """It can say where it is, and go on from there."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class _Watch:
    """Sees in microseconds whether anything has been changed since it was made."""

    def __init__(self, root: Any) -> None:
        self._bindings: list[tuple[Any, list[Any], list[Any]]] = []
        """Containers with their keys and what these were bound to; it must stay alive, or another could take its place."""
        self._contents: list[tuple[Any, Any]] = []
        """What can be changed in place, with its content."""
        seen: set[int] = set()
        self._walk(root, seen)

    def _walk(self, value: Any, seen: set[int]) -> None:
        if type(value) in PLAIN or id(value) in seen:
            return
        seen.add(id(value))
        if (told := tell(value)) is not None:
            self._contents.append((value, told))
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
            elif not same(tell(value), [kind, content]):
                return True
        return False


def _lies_below(path: Path, others: list[Path]) -> bool:
    return any(path[: len(other)] == other for other in others)

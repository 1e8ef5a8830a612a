"""A dataset of its own for every rank and data worker, without copying the data.

In PyTorch each data worker of each rank has a copy of the dataset, made by forking: a generator or a counter that the
dataset keeps lives as many separate lives. Here one process stands in for data workers of several ranks, so each gets a
`Twin`: the objects that dataset, `collate_fn` and `worker_init_fn` are made of are copied, together with their random
generators, plain values, and small lists, dicts, tensors and arrays; all that is large is shared (`_LARGE`), and so
is what cannot be copied safely: open files, objects that say themselves how they are copied or closed.

What a twin holds is told as a plain value: its `state_dict()` if the dataset offers that, else what differs from the
dataset as the script made it. Usually that is nothing. It is committed with every batch, moves with the virtual worker,
and is put into another twin elsewhere. What is shared is not part of it: a cache may be; what decides bits must not.
"""

from __future__ import annotations

import copy
import operator
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

_LARGE = 256
"""Strings, lists, dicts, sets, tensors and arrays with more elements than this are shared."""
_PLAIN = (types.NoneType, bool, int, float, complex, str, bytes)
_OWN_WAYS = ("__del__", "__copy__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
_MISSING = object()

Path = tuple[tuple[str, Any], ...]
Held = dict[str, Any]


class Twin:
    """Copies of objects that belong together, and what they hold."""

    def __init__(self, *originals: Any, keep: Iterable[Any] = ()) -> None:
        """Whatever is in `keep` is not copied, wherever it turns up."""
        self._keep = {id(thing): thing for thing in keep}
        self._originals = list(originals)
        self._followed = dict(_bindings(self._originals))
        memo: dict[int, Any] = dict(self._keep)
        self.parts = [_copied(original, memo) for original in originals]
        self._stateful = [offers_state(part) for part in self.parts]
        self._pristine = dict(_told(self._without_stateful(list(originals))))
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
            _set(self.parts, path, wanted.get(path, self._pristine.get(path, _MISSING)))
        for number, state in (held["state_dicts"] if held else {}).items():
            self.parts[number].load_state_dict(copy.deepcopy(state))

    def follow(self) -> None:
        """Take over what the script has changed in the originals since the twin was made, or followed them last."""
        now = dict(_bindings(self._originals))
        taken: list[Path] = []
        for path, value in now.items():
            known = path in self._followed and _is_same(value, self._followed[path])
            if not known and not _lies_below(path, taken):
                _bind(self.parts, path, _copied(value[0], dict(self._keep)))
                taken.append(path)
        for path in self._followed.keys() - now.keys():
            if not _lies_below(path, taken):
                _set(self.parts, path, _MISSING)
        if taken or len(now) != len(self._followed):
            self._followed, self._known = now, None
            self._pristine = dict(_told(self._without_stateful(self._originals)))

    def _changes(self) -> dict[Path, Any]:
        """What differs from the originals. Most datasets never change anything: then it is enough to see that."""
        if self._known is None or self._known[0].changed():
            parts = self._without_stateful(self.parts)
            self._known = _Watch(parts), self._compare(parts)
        return self._known[1]

    def _compare(self, parts: list[Any]) -> dict[Path, Any]:
        now = dict(_told(parts))
        changes = {
            path: value for path, value in now.items() if not _same(value, self._pristine.get(path, _MISSING))
        }
        for path in self._pristine.keys() - now.keys():
            if _get(self.parts, path) is _MISSING:
                changes[path] = ["gone"]
        return changes

    def _without_stateful(self, parts: list[Any]) -> list[Any]:
        return [None if stateful else part for part, stateful in zip(parts, self._stateful, strict=True)]


def offers_state(thing: Any) -> bool:
    """It can say where it is, and go on from there."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


# What things are made of.


def _is_plain(value: Any, room: int = _LARGE) -> bool:
    return _plain_size(value, room) <= room


def _plain_size(value: Any, room: int) -> int:
    """How many plain values it consists of; more than `room` if there are more, or others."""
    kind = type(value)
    if kind in _PLAIN:
        return 1 if kind not in (str, bytes) or len(value) <= _LARGE else room + 1
    if kind not in (list, tuple, dict, set) or len(value) > room:
        return room + 1
    size = 1
    for item in value.items() if kind is dict else value:
        size += _plain_size(item, room - size)
        if size > room:
            break
    return size


def _is_small_array(value: Any) -> bool:
    if type(value) is torch.Tensor:
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
        return plain and value.numel() <= _LARGE
    return type(value) is np.ndarray and value.dtype.kind in "biufc" and value.size <= _LARGE


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    return type(value) in (random.Random, np.random.Generator, np.random.RandomState)


def _is_object(value: Any) -> bool:
    """An object of a class that leaves to Python how it is copied, and whose parts are its attributes."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names or isinstance(value, type):
        return False
    if not hasattr(value, "__dict__") or any(hasattr(kind, name) for name in _OWN_WAYS):
        return False
    own_way = any(
        getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__")
    )
    own_way |= getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None)
    own_way |= any(name not in ("__dict__", "__weakref__") for part in kind.__mro__ for name in _slots(part))
    own_new: Any = kind.__new__
    return (not own_way and own_new is object.__new__) or isinstance(value, torch.nn.Module)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _parts(value: Any) -> Iterator[tuple[tuple[str, Any], Any]] | None:
    """What an object or a container consists of, each with its name; None if it is not taken apart."""
    kind = type(value)
    if kind is types.MethodType:
        return iter([(("attribute", "__self__"), value.__self__)])
    if kind in (list, tuple) and len(value) <= _LARGE:
        return ((("item", number), item) for number, item in enumerate(value))
    if kind is dict and len(value) <= _LARGE:
        return ((("item", key), item) for key, item in value.items() if type(key) in _PLAIN)
    if _is_object(value):
        return ((("attribute", name), item) for name, item in vars(value).items())
    return None


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    made: Any = value
    if kind in _PLAIN:
        return value
    if _is_generator(value):
        made = value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
    elif _is_small_array(value):
        made = value.clone() if kind is torch.Tensor else value.copy()
    elif kind is types.MethodType:
        owner = _copied(value.__self__, memo)
        made = value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    elif kind is set and len(value) <= _LARGE:
        made = set(value)
    elif kind is tuple and len(value) <= _LARGE:
        made = tuple(_copied(item, memo) for item in value)
    elif kind is list and len(value) <= _LARGE:
        made = memo[id(value)] = []
        made += (_copied(item, memo) for item in value)
    elif kind is dict and len(value) <= _LARGE:
        made = memo[id(value)] = {}
        made |= {key: _copied(item, memo) for key, item in value.items()}
    elif _is_object(value):
        made = memo[id(value)] = object.__new__(kind)
        vars(made).update({name: _copied(item, memo) for name, item in vars(value).items()})
    memo[id(value)] = made
    return made


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
        if type(value) in _PLAIN or id(value) in seen:
            return
        seen.add(id(value))
        if (told := _tell(value)) is not None:
            self._contents.append((value, told))
            return
        parts = _parts(value)
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
            if value != content if kind == "plain" else not _same(_tell(value), [kind, content]):
                return True
        return False


# What they hold, as plain values.


def _told(root: Any) -> Iterator[tuple[Path, Any]]:
    """Every value that is part of the state, with the way to it, as plain values."""
    seen: set[int] = set()

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        told = _tell(value)
        if told is not None:
            yield path, told
        elif id(value) not in seen:
            seen.add(id(value))
            for name, part in _parts(value) or ():
                yield from walk(part, (*path, name))

    return walk(root, ())


def _tell(value: Any) -> list[Any] | None:
    if _is_plain(value):
        return ["plain", value if type(value) in _PLAIN else copy.deepcopy(value)]
    if _is_small_array(value):
        return ["array", value.clone() if isinstance(value, torch.Tensor) else value.copy()]
    if _is_generator(value):
        if isinstance(value, torch.Generator):
            return ["torch", value.get_state()]
        if isinstance(value, random.Random):
            return ["random", list(value.getstate())]
        if isinstance(value, np.random.RandomState):
            return ["numpy legacy", value.get_state(legacy=False)]
        return ["numpy", value.bit_generator.state]
    return None


def _bindings(root: Any) -> Iterator[tuple[Path, tuple[Any, Any]]]:
    """Everything there is, with the way to it: the thing itself, and what it tells if it is part of the state."""
    seen: set[int] = set()

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, tuple[Any, Any]]]:
        told = _tell(value)
        if path:
            yield path, (value, told)
        if told is None and id(value) not in seen:
            seen.add(id(value))
            for name, part in _parts(value) or ():
                yield from walk(part, (*path, name))

    return walk(root, ())


def _lies_below(path: Path, others: list[Path]) -> bool:
    return any(path[: len(other)] == other for other in others)


def _is_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[1] is None or other[1] is None:
        return one[0] is other[0]
    return _same(one[1], other[1])


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and one[:1] != ["random"]:
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _step(value: Any, step: tuple[str, Any]) -> Any:
    kind, key = step
    try:
        return getattr(value, key) if kind == "attribute" else value[key]
    except (AttributeError, LookupError, TypeError):
        return _MISSING


def _get(root: Any, path: Path) -> Any:
    for step in path:
        root = _step(root, step)
        if root is _MISSING:
            return _MISSING
    return root


def _set(root: Any, path: Path, told: Any) -> None:
    """Put what was told where it belongs. A generator or an array that is there is changed in place: others may know it."""
    holder, (kind, key) = _get(root, path[:-1]), path[-1]
    if holder is _MISSING or type(holder) in (tuple, types.MethodType):
        return
    if told is _MISSING or told[0] == "gone":
        vars(holder).pop(key, None) if kind == "attribute" else holder.pop(key, None)
        return
    _bind(root, path, _made(told, _get(root, path)))


def _bind(root: Any, path: Path, value: Any) -> None:
    holder, (kind, key) = _get(root, path[:-1]), path[-1]
    if holder is _MISSING or type(holder) in (tuple, types.MethodType):
        return
    if kind == "attribute":
        vars(holder)[key] = value
    elif type(holder) is list and key >= len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _made(told: list[Any], present: Any) -> Any:
    kind, state = told
    if kind == "plain":
        return copy.deepcopy(state)
    if kind == "array":
        if type(present) is type(state) and present.shape == state.shape and present.dtype == state.dtype:
            present[...] = state
            return present
        return copy.deepcopy(state)
    if kind == "torch":
        torch_generator = present if isinstance(present, torch.Generator) else torch.Generator()
        torch_generator.set_state(state)
        return torch_generator
    if kind == "random":
        python = present if type(present) is random.Random else random.Random()
        python.setstate((state[0], tuple(state[1]), state[2]))
        return python
    if kind == "numpy legacy":
        legacy = present if type(present) is np.random.RandomState else np.random.RandomState()
        legacy.set_state(state)
        return legacy
    bits = getattr(np.random, state["bit_generator"])
    fits = type(present) is np.random.Generator and type(present.bit_generator) is bits
    generator = present if fits else np.random.Generator(bits())
    generator.bit_generator.state = copy.deepcopy(state)
    return generator

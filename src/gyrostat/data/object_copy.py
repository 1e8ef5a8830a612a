"""What a dataset, a sampler or a function is made of: which parts are copied, which are shared, and what they hold.

A thing is taken apart into objects, small lists, tuples and dicts, down to its leaves. Leaves that are told, as plain values,
are numbers, strings, small tensors and arrays, small containers of these, and random generators. All else is large or
opaque: it is shared and never told. `twin.py` next door makes copies with it and keeps track of them.
"""

from __future__ import annotations

import copy
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_LARGE = 256
"""Strings, lists, dicts, sets, tensors and arrays with more elements than this are shared."""
PLAIN = (types.NoneType, bool, int, float, complex, str, bytes)
_COLLECTIONS: dict[str, type[Any]] = {
    "deque": deque,
    "ordered": OrderedDict,
    "default": defaultdict,
    "counter": Counter,
}
_OWN_WAYS = ("__del__", "__copy__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
MISSING = object()

Path = tuple[tuple[str, Any], ...]


# What things are made of.


def is_plain(value: Any) -> bool:
    return _size(value, _LARGE, arrays=False) <= _LARGE


def _is_small(value: Any) -> bool:
    """A container of plain values and small arrays."""
    return type(value) in (list, tuple, dict) and _size(value, _LARGE, arrays=True) <= _LARGE


def _size(value: Any, room: int, *, arrays: bool) -> int:
    """How many plain values (and small arrays) it consists of; more than `room` if there are more, or others."""
    kind = type(value)
    if kind in PLAIN:
        return 1 if kind not in (str, bytes) or len(value) <= _LARGE else room + 1
    if arrays and _is_small_array(value):
        return 1
    if kind not in (list, tuple, dict, set) or len(value) > room:
        return room + 1
    size = 1
    for item in value.items() if kind is dict else value:
        size += _size(item, room - size, arrays=arrays and kind is not set)
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


def parts_of(value: Any) -> Iterator[tuple[tuple[str, Any], Any]] | None:
    """What an object or a container consists of, each with its name; None if it is not taken apart."""
    kind = type(value)
    if kind is types.MethodType:
        return iter([(("attribute", "__self__"), value.__self__)])
    if kind in (list, tuple) and len(value) <= _LARGE:
        return ((("item", number), item) for number, item in enumerate(value))
    if kind is dict and len(value) <= _LARGE:
        return ((("item", key), item) for key, item in value.items() if type(key) in PLAIN)
    if _is_object(value):
        return ((("attribute", name), item) for name, item in vars(value).items())
    return None


def copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    made: Any = value
    if kind in PLAIN:
        return value
    if _is_generator(value):
        made = value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
    elif _is_small_array(value):
        made = value.clone() if kind is torch.Tensor else value.copy()
    elif kind is types.MethodType:
        owner = copied(value.__self__, memo)
        made = value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    elif kind is set and len(value) <= _LARGE:
        made = set(value)
    elif kind is deque and len(value) <= _LARGE:
        made = memo[id(value)] = deque(maxlen=value.maxlen)
        made.extend(copied(item, memo) for item in value)
    elif kind in (OrderedDict, defaultdict, Counter) and len(value) <= _LARGE:
        made = memo[id(value)] = copy.copy(value)
        made.update({key: copied(item, memo) for key, item in value.items()})
    elif kind is tuple and len(value) <= _LARGE:
        made = tuple(copied(item, memo) for item in value)
    elif kind is list and len(value) <= _LARGE:
        made = memo[id(value)] = []
        made += (copied(item, memo) for item in value)
    elif kind is dict and len(value) <= _LARGE:
        made = memo[id(value)] = {}
        made |= {key: copied(item, memo) for key, item in value.items()}
    elif _is_object(value):
        made = memo[id(value)] = object.__new__(kind)
        vars(made).update({name: copied(item, memo) for name, item in vars(value).items()})
    memo[id(value)] = made
    return made


# What they hold, as plain values.


def told(root: Any) -> Iterator[tuple[Path, Any]]:
    """Every value that is part of the state, with the way to it, as plain values."""
    seen: set[int] = set()

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        told = tell(value)
        if told is not None:
            yield path, told
        elif id(value) not in seen:
            seen.add(id(value))
            for name, part in parts_of(value) or ():
                yield from walk(part, (*path, name))

    return walk(root, ())


def tell(value: Any) -> list[Any] | None:
    """[what kind of thing it is, what it holds]; None if it is not told."""
    if is_plain(value):
        return ["plain", value if type(value) in PLAIN else copy.deepcopy(value)]
    if _is_small(value):
        return ["small", copy.deepcopy(value)]
    for name, kind in _COLLECTIONS.items():
        if type(value) is kind and len(value) <= _LARGE:
            content: Any = [value.maxlen, list(value)] if kind is deque else dict(value)
            return [name, copy.deepcopy(content)] if is_plain(content) or _is_small(content) else None
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


def bindings(root: Any) -> Iterator[tuple[Path, tuple[Any, Any]]]:
    """Everything there is, with the way to it: the thing itself, and what it tells if it is part of the state."""
    seen: set[int] = set()

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, tuple[Any, Any]]]:
        told = tell(value)
        if path:
            yield path, (value, told)
        if told is None and id(value) not in seen:
            seen.add(id(value))
            for name, part in parts_of(value) or ():
                yield from walk(part, (*path, name))

    return walk(root, ())


def is_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[1] is None or other[1] is None:
        return one[0] is other[0]
    return same(one[1], other[1])


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and not _is_random_state(one):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _is_random_state(told: Any) -> bool:
    """625 numbers: compared as a whole."""
    return type(told) is list and len(told) == 2 and type(told[0]) is str and told[0] == "random"


def _step(value: Any, step: tuple[str, Any]) -> Any:
    kind, key = step
    try:
        return getattr(value, key) if kind == "attribute" else value[key]
    except (AttributeError, LookupError, TypeError):
        return MISSING


def find(root: Any, path: Path) -> Any:
    for step in path:
        root = _step(root, step)
        if root is MISSING:
            return MISSING
    return root


def put(root: Any, path: Path, told: Any) -> None:
    """Put what was told where it belongs. A generator or an array that is there is changed in place: others may know it."""
    holder, (kind, key) = find(root, path[:-1]), path[-1]
    if holder is MISSING or type(holder) in (tuple, types.MethodType):
        return
    if told is MISSING or told[0] == "gone":
        if kind == "attribute":
            vars(holder).pop(key, None)
        elif type(holder) is list:  # it is shorter
            del holder[key:]
        else:
            holder.pop(key, None)
        return
    bind(root, path, _made(told, find(root, path)))


def bind(root: Any, path: Path, value: Any) -> None:
    holder, (kind, key) = find(root, path[:-1]), path[-1]
    if holder is MISSING or type(holder) in (tuple, types.MethodType):
        return
    if kind == "attribute":
        vars(holder)[key] = value
    elif type(holder) is list and key >= len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _made(told: list[Any], present: Any) -> Any:
    kind, state = told
    if kind in ("plain", "small"):
        return copy.deepcopy(state)
    if kind in _COLLECTIONS:
        return _collection(_COLLECTIONS[kind], copy.deepcopy(state), present)
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


def _collection(kind: type[Any], state: Any, present: Any) -> Any:
    """The one that is there, filled anew: only it knows what a defaultdict makes of a missing key."""
    if kind is deque:
        maxlen, items = state
        line: Any = present if type(present) is deque and present.maxlen == maxlen else deque(maxlen=maxlen)
        line.clear()
        line.extend(items)
        return line
    made: Any = present if type(present) is kind else kind()
    made.clear()
    made.update(state)
    return made

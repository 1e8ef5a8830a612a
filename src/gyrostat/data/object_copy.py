"""Copies a dataset, a sampler or a function, except for its large parts, and reads and writes its state as plain values.

An object is traversed through its attributes and through small lists, tuples and dicts, down to its leaves. Leaves that are
part of the state, as plain values, are numbers, strings, small tensors and arrays, small containers of these, and random
generators. Everything else is large or opaque: it is shared by all copies and not part of the state. `dataset_replica.py`
makes copies with this module and keeps track of them.
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
_COPY_METHODS = ("__del__", "__copy__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
MISSING = object()

Path = tuple[tuple[str, Any], ...]


# Traversal and copies.


def is_plain(value: Any) -> bool:
    return _size(value, _LARGE, arrays=False) <= _LARGE


def _is_small(value: Any) -> bool:
    """A container of plain values and small arrays."""
    return type(value) in (list, tuple, dict) and _size(value, _LARGE, arrays=True) <= _LARGE


def _size(value: Any, room: int, *, arrays: bool) -> int:
    """How many plain values (and small arrays) a value consists of; more than `room` if there are more, or others."""
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
    """Whether it can be copied attribute by attribute: its class does not define how it is copied."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names or isinstance(value, type):
        return False
    if not hasattr(value, "__dict__") or any(hasattr(kind, name) for name in _COPY_METHODS):
        return False
    custom = any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    custom |= getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None)
    custom |= any(name not in ("__dict__", "__weakref__") for part in kind.__mro__ for name in _slots(part))
    new: Any = kind.__new__
    return (not custom and new is object.__new__) or isinstance(value, torch.nn.Module)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def parts_of(value: Any) -> Iterator[tuple[tuple[str, Any], Any]] | None:
    """The parts of an object or a container, each with its name; None if it is not traversed."""
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


def copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """A copy in which large and opaque parts are shared. `memo`: copies made so far, by the id of the original."""
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
        owner = copy_of(value.__self__, memo)
        made = value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    elif kind is set and len(value) <= _LARGE:
        made = set(value)
    elif kind is deque and len(value) <= _LARGE:
        made = memo[id(value)] = deque(maxlen=value.maxlen)
        made.extend(copy_of(item, memo) for item in value)
    elif kind in (OrderedDict, defaultdict, Counter) and len(value) <= _LARGE:
        made = memo[id(value)] = copy.copy(value)
        made.update({key: copy_of(item, memo) for key, item in value.items()})
    elif kind is tuple and len(value) <= _LARGE:
        made = tuple(copy_of(item, memo) for item in value)
    elif kind is list and len(value) <= _LARGE:
        made = memo[id(value)] = []
        made += (copy_of(item, memo) for item in value)
    elif kind is dict and len(value) <= _LARGE:
        made = memo[id(value)] = {}
        made |= {key: copy_of(item, memo) for key, item in value.items()}
    elif _is_object(value):
        made = memo[id(value)] = object.__new__(kind)
        vars(made).update({name: copy_of(item, memo) for name, item in vars(value).items()})
    memo[id(value)] = made
    return made


# The state as plain values.


def state_leaves(root: Any) -> Iterator[tuple[Path, Any]]:
    """Every leaf that is part of the state: its path, and `leaf_state` of it."""
    seen: set[int] = set()

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        state = leaf_state(value)
        if state is not None:
            yield path, state
        elif id(value) not in seen:
            seen.add(id(value))
            for name, part in parts_of(value) or ():
                yield from walk(part, (*path, name))

    return walk(root, ())


def leaf_state(value: Any) -> list[Any] | None:
    """[kind, content] of a leaf, as plain values; None if the value is not a leaf of the state."""
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
    """Every object that can be reached: its path, the object itself, and its `leaf_state`."""
    seen: set[int] = set()

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, tuple[Any, Any]]]:
        state = leaf_state(value)
        if path:
            yield path, (value, state)
        if state is None and id(value) not in seen:
            seen.add(id(value))
            for name, part in parts_of(value) or ():
                yield from walk(part, (*path, name))

    return walk(root, ())


def same_binding(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two values of `bindings` are the same object, or have equal states."""
    if one[1] is None or other[1] is None:
        return one[0] is other[0]
    return equal(one[1], other[1])


def equal(one: Any, other: Any) -> bool:
    """Whether two states are equal, in types and order too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and not _is_random_state(one):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _is_random_state(state: Any) -> bool:
    """625 numbers, which are compared as a whole."""
    return type(state) is list and len(state) == 2 and type(state[0]) is str and state[0] == "random"


def _step(value: Any, step: tuple[str, Any]) -> Any:
    kind, key = step
    try:
        return getattr(value, key) if kind == "attribute" else value[key]
    except (AttributeError, LookupError, TypeError):
        return MISSING


def find(root: Any, path: Path) -> Any:
    """The value at a path, or `MISSING`."""
    for step in path:
        root = _step(root, step)
        if root is MISSING:
            return MISSING
    return root


def set_leaf(root: Any, path: Path, state: Any) -> None:
    """Give the leaf at a path this state. A generator or an array is changed in place, since others may refer to it."""
    holder, (kind, key) = find(root, path[:-1]), path[-1]
    if holder is MISSING or type(holder) in (tuple, types.MethodType):
        return
    if state is MISSING or state[0] == "gone":
        if kind == "attribute":
            vars(holder).pop(key, None)
        elif type(holder) is list:  # the list became shorter
            del holder[key:]
        else:
            holder.pop(key, None)
        return
    bind(root, path, _leaf(state, find(root, path)))


def bind(root: Any, path: Path, value: Any) -> None:
    """Make the object or container at the path's parent refer to `value`."""
    holder, (kind, key) = find(root, path[:-1]), path[-1]
    if holder is MISSING or type(holder) in (tuple, types.MethodType):
        return
    if kind == "attribute":
        vars(holder)[key] = value
    elif type(holder) is list and key >= len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _leaf(leaf: list[Any], present: Any) -> Any:
    """A leaf with this state: `present` if it has the right type, else a new one."""
    kind, state = leaf
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
    """`present`, filled anew, since only it has a defaultdict's factory; else a new collection."""
    if kind is deque:
        maxlen, items = state
        queue: Any = present if type(present) is deque and present.maxlen == maxlen else deque(maxlen=maxlen)
        queue.clear()
        queue.extend(items)
        return queue
    made: Any = present if type(present) is kind else kind()
    made.clear()
    made.update(state)
    return made

"""Flattens a state, and walks it by name."""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import torch

from gyrostat.core.errors import UsageError
from gyrostat.engine.state.statetree.skeleton import NUMPY_KINDS, Flat, Node, Skeleton, TensorSpec
from gyrostat.engine.state.tensorbytes import dtype_name, is_dense, same_memory_key, why_unstorable

_INLINE = 256
"""Longer bytes, and longer sequences of integers, are stored as a tensor instead of in the skeleton."""
_INT64 = range(-(2**63), 2**63)


def flatten(value: Any) -> Flat:
    """Flatten a state. Tensors are neither copied nor moved."""
    flattener = _Flattener()
    try:
        tree = flattener.node(value, "")
    except RecursionError:
        raise UsageError(
            "a state is nested too deeply to be stored; a state must not contain itself"
        ) from None
    return Flat(Skeleton(tree, flattener.specs), flattener.tensors, frozenset(flattener.tied))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a state with its dotted name, in the state's own order.

    Leaves are tensors, arrays and single values; a sequence of only single values is one leaf, and so is an empty container.
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, _join(path, key))
    elif type(value) in (list, tuple) and any(map(_is_branch, value)):
        for index, item in enumerate(value):
            yield from leaves(item, _join(path, index))
    else:
        yield path, value


def canonical_node(value: Any, path: str) -> Node:
    """The node of a leaf that is not a tensor, for digests."""
    return _Flattener(inline=True).node(value, path)


def _is_branch(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray | Mapping | list | tuple)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


@dataclass
class _Flattener:
    inline: bool = False
    """Keep long values in the skeleton too."""
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    tied: set[int] = field(default_factory=set)
    _seen: dict[Hashable, int] = field(default_factory=dict)
    _names: set[str] = field(default_factory=lambda: {"", "__metadata__"})
    """Names in use, and the two that a safetensors file cannot have."""

    def node(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind is str:
            return value if _is_unicode(value) else {"str": value.encode("utf-8", "surrogatepass").hex()}
        if kind is int:
            return value if value in _INT64 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack("<d", value).hex()}
        if value is None or kind is bool:
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensor(value, path)}
        if isinstance(value, np.generic):
            return self.scalar(np.asarray(value), path)
        write = _WRITERS.get(kind)
        if write is None:
            raise _unencodable(value, path)
        return write(self, value, path)

    def sequence(self, value: Sequence[Any], path: str) -> Node:
        if set(map(type, value)) == {int} and min(value) in _INT64 and max(value) in _INT64:
            if self.inline or len(value) <= _INLINE:
                return list(value)
            return {"ints": self.tensor(torch.from_numpy(np.array(value, np.int64)), path)}
        return [self.node(item, _join(path, index)) for index, item in enumerate(value)]

    def pairs(self, value: Mapping[Any, Any], path: str) -> list[Node]:
        return [[self.key(key, path), self.node(item, _join(path, key))] for key, item in value.items()]

    def key(self, key: object, path: str) -> Node:
        if type(key) is tuple:
            return {"tuple": [self.key(part, path) for part in key]}
        if type(key) in _KEY_TYPES or isinstance(key, np.generic):
            return self.node(key, path)
        raise UsageError(
            f"{_named(path)} has the key {key!r} of type {type(key).__qualname__}, which cannot be stored; "
            "use strings, numbers, or tuples of them as keys"
        )

    def ordered(self, value: OrderedDict[Any, Any], path: str) -> Node:
        # Module.state_dict() keeps submodules' versions in an attribute that load_state_dict reads.
        metadata = getattr(value, "_metadata", None)
        return {"ordered": [self.pairs(value, path), self.node(metadata, _join(path, "_metadata"))]}

    def members(self, value: set[Any] | frozenset[Any], path: str) -> list[Node]:
        return sorted((self.key(item, path) for item in value), key=msgspec.json.encode)

    def bytes(self, value: bytes, path: str) -> Node:
        if self.inline or len(value) <= _INLINE:
            return {"bytes": base64.b64encode(value).decode()}
        return {"blob": self.tensor(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)}

    def scalar(self, value: np.ndarray[Any, Any], path: str) -> Node:
        _check_numpy(value.dtype, path)
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}

    def array(self, value: np.ndarray[Any, Any], path: str) -> Node:
        _check_numpy(value.dtype, path)
        raw = bytearray(value.tobytes())
        blob = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return {"ndarray": [self.tensor(blob, path), value.dtype.str, list(value.shape)]}

    def tensor(self, tensor: torch.Tensor, path: str) -> int:
        if reason := why_unstorable(tensor):
            raise UsageError(
                f"{_named(path)} is a tensor that cannot be stored: {reason}; make it a plain, dense tensor"
            )
        key = same_memory_key(tensor)
        if key not in self._seen:
            name = self._unique(path or "value")
            shape, stride = list(tensor.shape), list(tensor.stride())
            keep = not tensor.is_contiguous() and is_dense(shape, stride)
            self._seen[key] = len(self.tensors)
            self.tensors.append((name, tensor))
            self.specs.append(TensorSpec(name, dtype_name(tensor.dtype), shape, stride if keep else None))
        else:
            self.tied.add(self._seen[key])
        return self._seen[key]

    def _unique(self, path: str) -> str:
        name = path if _is_unicode(path) else path.encode("utf-8", "backslashreplace").decode()
        base, count = name, 1
        while name in self._names:
            count += 1
            name = f"{base}#{count}"
        self._names.add(name)
        return name


_WRITERS: dict[type, Callable[[_Flattener, Any, str], Node]] = {
    list: _Flattener.sequence,
    tuple: lambda f, value, path: {"tuple": f.sequence(value, path)},
    dict: lambda f, value, path: {"dict": f.pairs(value, path)},
    defaultdict: lambda f, value, path: {"dict": f.pairs(value, path)},
    OrderedDict: _Flattener.ordered,
    Counter: lambda f, value, path: {"counter": f.pairs(value, path)},
    set: lambda f, value, path: {"set": f.members(value, path)},
    frozenset: lambda f, value, path: {"frozenset": f.members(value, path)},
    bytes: _Flattener.bytes,
    complex: lambda f, value, path: {"complex": struct.pack("<dd", value.real, value.imag).hex()},
    np.ndarray: _Flattener.array,
    torch.Size: lambda f, value, path: {"size": list(value)},
    torch.dtype: lambda f, value, path: {"dtype": dtype_name(value)},
    torch.device: lambda f, value, path: {"device": str(value)},
}

_KEY_TYPES = frozenset(
    {str, int, float, bool, NoneType, complex, bytes, torch.Size, torch.dtype, torch.device},
)


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, as in a file name that is not UTF-8
        return False
    return True


def _check_numpy(dtype: np.dtype[Any], path: str) -> None:
    if dtype.kind not in NUMPY_KINDS:
        raise UsageError(
            f"{_named(path)} is a NumPy array or scalar of type {dtype}, which cannot be stored; "
            "use numbers, booleans, text or dates"
        )


def _named(path: str) -> str:
    return f"{path!r} in the state" if path else "the state"


def _unencodable(value: object, path: str) -> UsageError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return UsageError(
        f"{_named(path)} is a {kind}, which cannot be stored; keep plain values there (numbers, strings, "
        "lists, tuples, dicts, tensors, arrays), or give the object that holds it a state_dict() of them"
    )

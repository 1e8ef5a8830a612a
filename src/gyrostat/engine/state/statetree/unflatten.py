"""The inverse of `flatten`. Strict: refuses a skeleton that `flatten` cannot have made."""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gyrostat.core.errors import MalformedState
from gyrostat.engine.state.statetree.skeleton import NUMPY_KINDS, Node, Skeleton, TensorSpec
from gyrostat.engine.state.tensorbytes import DTYPES, dtype_name, empty_tensor, tensor_bytes


def unflatten(skeleton: Skeleton, tensors: Sequence[torch.Tensor]) -> Any:
    """Make a state from its skeleton and the skeleton's tensors, in its order."""
    if len(tensors) != len(skeleton.tensors):
        raise MalformedState(f"a state has {len(skeleton.tensors)} tensors, but {len(tensors)} were given")
    ready = [_as_specified(*pair) for pair in zip(skeleton.tensors, tensors, strict=True)]
    try:
        return _Unflattener(ready).value(skeleton.tree)
    except RecursionError:
        raise MalformedState("a state is nested too deeply") from None


def allocate(spec: TensorSpec) -> torch.Tensor:
    """A tensor without its elements, to be filled through `tensor_bytes`."""
    try:
        return empty_tensor(spec.dtype, spec.shape)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise MalformedState(f"no tensor {spec.name!r} of shape {spec.shape} can be made: {error}") from None


def _as_specified(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    if dtype_name(tensor.dtype) != spec.dtype or list(tensor.shape) != spec.shape:
        raise MalformedState(
            f"the tensor {spec.name!r} should be {spec.dtype} {spec.shape}, "
            f"but is {dtype_name(tensor.dtype)} {list(tensor.shape)}"
        )
    if spec.stride is None or list(tensor.stride()) == spec.stride:
        return tensor
    laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor)


@dataclass
class _Unflattener:
    tensors: list[torch.Tensor]

    def value(self, node: Node) -> Any:
        if type(node) is list:
            return self.sequence(node)
        if type(node) is not dict:
            return node
        if len(node) != 1:
            raise MalformedState(f"a node of a state has {len(node)} tags instead of one: {sorted(node)[:5]}")
        ((tag, payload),) = node.items()
        read = _READERS.get(tag)
        if read is None:
            raise MalformedState(f"unknown tag {tag!r} in a state; a newer version of gyrostat may know it")
        try:
            return read(self, payload)
        except RecursionError:
            raise
        except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, struct.error) as error:
            raise MalformedState(f"a malformed {tag} in a state: {error}") from None

    def sequence(self, nodes: Node) -> list[Any]:
        if type(nodes) is dict and list(nodes) == ["ints"]:
            return self.ints(nodes["ints"])
        items: list[Node] = _typed(nodes, list)
        if set(map(type, items)) == {int}:
            return items[:]
        return [self.value(node) for node in items]

    def mapping(self, pairs: Node) -> dict[Any, Any]:
        result = {}
        for key, item in _typed(pairs, list):
            result[self.value(key)] = self.value(item)
        if len(result) != len(pairs):
            raise ValueError("a key occurs twice")
        return result

    def ordered(self, payload: Node) -> OrderedDict[Any, Any]:
        pairs, metadata = _typed(payload, list)
        result = OrderedDict(self.mapping(pairs))
        if metadata is not None:
            result._metadata = self.value(metadata)  # type: ignore[attr-defined]
        return result

    def tensor(self, index: Node) -> torch.Tensor:
        if not 0 <= _typed(index, int) < len(self.tensors):
            raise ValueError(f"there is no tensor {index}")
        return self.tensors[index]

    def ints(self, index: Node) -> list[int]:
        tensor = self.tensor(index)
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise ValueError("a sequence of integers is a row of int64")
        return tensor.tolist()

    def array(self, payload: Node) -> np.ndarray[Any, Any]:
        index, dtype, shape = _typed(payload, list)
        element, raw = _numpy_dtype(dtype), tensor_bytes(self.tensor(index))
        if len(raw) != element.itemsize * math.prod(_typed(size, int) for size in _typed(shape, list)):
            raise ValueError(f"{len(raw)} bytes are not {shape} elements of {dtype}")
        result = np.empty(tuple(shape), element)
        if len(raw):
            result.reshape(-1).view(np.uint8)[:] = raw
        return result


def _scalar(_: _Unflattener, payload: Node) -> Any:
    dtype, digits = _typed(payload, list)
    element, data = _numpy_dtype(dtype), bytes.fromhex(digits)
    if len(data) != element.itemsize:
        raise ValueError(f"{len(data)} bytes are not one {dtype}")
    return np.ndarray((), element, buffer=data)[()]


def _numpy_dtype(name: Node) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(_typed(name, str))
    if dtype.kind not in NUMPY_KINDS or dtype.str != name:
        raise ValueError(f"{name!r} is not an element type that is stored")
    return dtype


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected a {kind.__name__}, got a {type(value).__name__}")
    return value


_READERS: dict[str, Callable[[_Unflattener, Node], Any]] = {
    "tuple": lambda u, payload: tuple(u.sequence(payload)),
    "dict": _Unflattener.mapping,
    "ordered": _Unflattener.ordered,
    "counter": lambda u, payload: Counter(u.mapping(payload)),
    "set": lambda u, payload: set(u.sequence(payload)),
    "frozenset": lambda u, payload: frozenset(u.sequence(payload)),
    "str": lambda u, payload: bytes.fromhex(payload).decode("utf-8", "surrogatepass"),
    "int": lambda u, payload: int(_typed(payload, str), 16),
    "float": lambda u, payload: struct.unpack("<d", bytes.fromhex(payload))[0],
    "complex": lambda u, payload: complex(*struct.unpack("<dd", bytes.fromhex(payload))),
    "ints": _Unflattener.ints,
    "bytes": lambda u, payload: base64.b64decode(payload, validate=True),
    "blob": lambda u, payload: bytes(tensor_bytes(u.tensor(payload))),
    "tensor": _Unflattener.tensor,
    "ndarray": _Unflattener.array,
    "scalar": _scalar,
    "size": lambda u, payload: torch.Size(payload),
    "dtype": lambda u, payload: DTYPES[payload],
    "device": lambda u, payload: torch.device(_typed(payload, str)),
}

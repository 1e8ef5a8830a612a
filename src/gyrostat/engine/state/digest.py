"""Digests of training state: equal if and only if every bit of it is.

`digest` is the public one: a SHA-256 over all leaves of the given objects, sorted by name. It does not depend on the device,
on strides, or on the order of dicts. `tensor_digests` returns one per leaf, so that the first difference can be named.
`checksum` is a fast one, by which replicas are compared regularly.

    leaf    SHA-256 of "tensor <dtype> <shape>\\n" and the elements in row-major order,
            or of "value\\n" and the leaf's JSON as `statetree` writes it
    digest  SHA-256 of "gyrostat digest 1\\n" and, sorted by name, "<length of name>:<name>=<hex of leaf>\\n"
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
import torch

from gyrostat.core.errors import UsageError
from gyrostat.engine.state.statetree import canonical_node, leaves
from gyrostat.engine.state.tensorbytes import dtype_name, same_memory_key, tensor_bytes, why_unstorable

_T = TypeVar("_T")
_Chunks = Iterable[bytes | memoryview]


def digest(**objects: Any) -> str:
    """The SHA-256, in 64 hexadecimal digits, of the state of the given objects.

    An object may be a tensor, anything that has `state_dict()` (modules, optimizers, schedulers, scalers), a
    plain value, or a dict or list of such. Names count: the same model under another name has another digest.
    """
    return digest_of(tensor_digests(**objects))


def tensor_digests(**objects: Any) -> dict[str, str]:
    """The SHA-256 of every leaf by its dotted name, in the objects' own order."""
    return _each_leaf(objects, _sha256)


def digest_of(leaf_digests: Mapping[str, str]) -> str:
    """The `digest` of objects, from their `tensor_digests`."""
    whole = sha256(b"gyrostat digest 1\n")
    for name in sorted(leaf_digests):
        text = f"{len(name)}:{name}={leaf_digests[name]}\n"
        whole.update(text.encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def checksum(tree: Any) -> dict[str, int]:
    """A fast checksum of every leaf of a state by its dotted name. It is not cryptographic."""
    return _each_leaf(tree, _crc32)


def state_of(thing: Any) -> Any:
    """The `state_dict()` of an object that has one, also inside dicts and lists; else the object itself."""
    if isinstance(thing, torch.Tensor):
        return thing
    if callable(method := getattr(thing, "state_dict", None)):
        return method()
    if isinstance(thing, Mapping):
        return {key: state_of(item) for key, item in thing.items()}
    if type(thing) in (list, tuple):
        return type(thing)(state_of(item) for item in thing)
    return thing


def _each_leaf(thing: Any, summarize: Callable[[_Chunks], _T]) -> dict[str, _T]:
    result: dict[str, _T] = {}
    known: dict[Hashable, _T] = {}  # a tied tensor is hashed once, and listed under each of its names
    for path, leaf in leaves(state_of(thing)):
        if isinstance(leaf, torch.Tensor):
            key = same_memory_key(leaf)
            if key not in known:
                known[key] = summarize(_chunks(path, leaf))
            value = known[key]
        else:
            value = summarize(_chunks(path, leaf))
        result[_unused(path, result)] = value
    return result


def _unused(path: str, taken: Mapping[str, object]) -> str:
    """Dots in keys can make two names equal; the second gets a number."""
    name, count = path, 1
    while name in taken:
        count += 1
        name = f"{path}#{count}"
    return name


def _chunks(path: str, leaf: Any) -> Iterator[bytes | memoryview]:
    if isinstance(leaf, torch.Tensor):
        if reason := why_unstorable(leaf):
            raise UsageError(
                f"{path!r} is a tensor that has no digest: {reason}; convert it to a plain, dense tensor"
            )
        yield f"tensor {dtype_name(leaf.dtype)} {list(leaf.shape)}\n".encode()
        yield tensor_bytes(leaf)
    elif type(leaf) is np.ndarray and leaf.dtype.kind in "biufc":
        yield f"ndarray {leaf.dtype.str} {list(leaf.shape)}\n".encode()
        yield leaf.tobytes()
    else:
        yield b"value\n"
        yield json.dumps(canonical_node(leaf, path), separators=(",", ":")).encode()


def _sha256(chunks: _Chunks) -> str:
    whole = sha256()
    for chunk in chunks:
        whole.update(chunk)
    return whole.hexdigest()


def _crc32(chunks: _Chunks) -> int:
    value = 0
    for chunk in chunks:
        value = zlib.crc32(chunk, value)
    return value

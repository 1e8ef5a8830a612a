"""A state as one self-contained message: magic and version, length of the skeleton, skeleton, elements."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from gyrostat.core.errors import MalformedState
from gyrostat.engine.state.statetree.flatten import flatten
from gyrostat.engine.state.statetree.skeleton import Skeleton
from gyrostat.engine.state.statetree.unflatten import allocate, unflatten
from gyrostat.engine.state.tensorbytes import tensor_bytes

_MAGIC = b"gyrostate\x01"
_START = len(_MAGIC) + 8

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Skeleton)


def encode(value: Any) -> bytes:
    """A state as one message."""
    flat = flatten(value)
    header = _encoder.encode(flat.skeleton)
    elements = (tensor_bytes(tensor) for _, tensor in flat.tensors)
    return b"".join((_MAGIC, struct.pack("<Q", len(header)), header, *elements))


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The inverse of `encode`. Raises MalformedState for what `encode` does not write."""
    view = memoryview(data).cast("B")
    if len(view) < _START or view[: len(_MAGIC)] != _MAGIC:
        raise MalformedState("these bytes are not an encoded state, or one of another version of gyrostat")
    (length,) = struct.unpack_from("<Q", view, len(_MAGIC))
    position = _START + length
    try:
        skeleton = _decoder.decode(view[_START:position])
    except (ValueError, RecursionError) as error:
        raise MalformedState(f"an encoded state is malformed: {error}") from None
    if position + sum(spec.size for spec in skeleton.tensors) != len(view):
        raise MalformedState(f"an encoded state of {len(view)} bytes is cut off or too long")
    tensors = []
    for spec in skeleton.tensors:
        tensors.append(tensor := allocate(spec))
        tensor_bytes(tensor)[:] = view[position : position + spec.size]
        position += spec.size
    return unflatten(skeleton, tensors)

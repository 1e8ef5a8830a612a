"""Tensors in a safetensors file, streamed: one pass to write and one to read, without a copy of the whole.

The `safetensors` package can read these files. It is not used here because it needs all tensors at once and in separate
memory, does not write through `disk.py`, and maps files on reading, where a checksum has to be verified before use.

The header is a function of the tensors' names, types and shapes, which the manifest holds. So reading compares the header
instead of parsing it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from hashlib import sha256
from io import FileIO
from typing import Any

import torch

from gyrostat.core.errors import DamagedCheckpoint
from gyrostat.engine.checkpoint.manifest import FileRecord
from gyrostat.engine.state.statetree import TensorSpec, allocate
from gyrostat.engine.state.tensorbytes import DTYPES, tensor_bytes

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""safetensors' names of element types. Tensors of other types are stored as rows of bytes."""

_SLICE = 16 * 1024 * 1024


def chunks(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The whole file, piece by piece. A tensor on an accelerator is fetched when its piece is."""
    yield _header(specs)
    for index in _order(specs):
        yield tensor_bytes(tensors[index])


def read(file: FileIO, specs: Sequence[TensorSpec], record: FileRecord) -> list[torch.Tensor]:
    """The tensors, in the order of `specs`. Raises DamagedCheckpoint if the file is not as recorded."""
    header = _header(specs)
    if record.size != len(header) + sum(spec.size for spec in specs):
        raise DamagedCheckpoint(
            f"the manifest gives a size of {record.size} bytes, which its tensors do not have"
        )
    checksum = sha256()
    _read_into(file, memoryview(found := bytearray(len(header))), checksum)
    if found != header:
        raise DamagedCheckpoint("its header is altered")
    tensors: dict[int, torch.Tensor] = {}
    for index in _order(specs):
        tensors[index] = allocate(specs[index])
        _read_into(file, tensor_bytes(tensors[index]), checksum)
    if checksum.hexdigest() != record.sha256:
        raise DamagedCheckpoint("its checksum is wrong: some of its bytes are altered")
    return [tensors[index] for index in range(len(specs))]


def _read_into(file: FileIO, view: memoryview, checksum: Any) -> None:
    while len(view):
        count = file.readinto(view[:_SLICE])
        if not count:
            raise DamagedCheckpoint("it is cut off")
        checksum.update(view[:count])
        view = view[count:]


def _order(specs: Sequence[TensorSpec]) -> list[int]:
    """Wide elements first, as in the safetensors package, so that all are aligned."""
    return sorted(range(len(specs)), key=lambda index: -DTYPES[specs[index].dtype].itemsize)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for index in _order(specs):
        spec = specs[index]
        dtype, shape = _NAMES.get(spec.dtype), spec.shape
        if dtype is None:
            dtype, shape = "U8", [spec.size]
        entries[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + spec.size]}
        start += spec.size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text

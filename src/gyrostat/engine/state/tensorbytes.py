"""A tensor as the bytes of its elements, without a copy where possible.

Digests, checkpoints and messages all read tensors through this module, so that none of them depends on the device or the
strides of a tensor. Bytes are in the machine's order: little-endian on all machines that torch is built for.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

_FAMILIES = {
    "": ["bool", "bfloat16"],
    "uint": ["8", "16", "32", "64"],
    "int": ["8", "16", "32", "64"],
    "float": ["16", "32", "64", "4_e2m1fn_x2"],
    "float8_": ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"],
    "complex": ["32", "64", "128"],
}

DTYPES: dict[str, torch.dtype] = {
    family + member: getattr(torch, family + member)
    for family, members in _FAMILIES.items()
    for member in members
    if hasattr(torch, family + member)
}
"""Element types that can be stored. Quantized ones cannot: their scale is not in their bytes."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_ALIGNMENT = 64
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def why_unstorable(tensor: torch.Tensor) -> str | None:
    """Why this tensor cannot be stored as bytes, or None if it can."""
    if type(tensor) not in _PLAIN_TYPES:
        return f"it is a {type(tensor).__module__}.{type(tensor).__qualname__}, not a plain tensor"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"its element type is {tensor.dtype}"
    return None


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order. Shares memory with a tensor that is contiguous and on the CPU."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return byte_row(tensor.detach().cpu()).numpy().data


def byte_row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as a tensor of bytes on the same device. Not for tensors without elements."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def empty_tensor(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """An uninitialized contiguous CPU tensor, at the alignment of torch's own allocator.

    The alignment matters: some matrix libraries add in another order where memory is not aligned.
    """
    raw = torch.empty(count_bytes(dtype, shape), dtype=torch.uint8, device="cpu")
    return raw.view(DTYPES[dtype]).view(tuple(shape))


def count_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of torch's own allocator."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps or overlaps, in any order of dimensions."""
    if len(shape) != len(stride) or 0 in shape:
        return False
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def same_memory_key(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors that are the same view of the same memory, such as tied parameters."""
    if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided or tensor.numel() == 0:
        return id(tensor)
    view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)

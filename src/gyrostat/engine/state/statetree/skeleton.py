"""A state without the elements of its tensors, as JSON.

null, booleans, strings, arrays, finite floats and 64-bit integers stand for themselves. Everything else is an
object with one key, its tag: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"tensor": 3}`, and so on;
the full list is the table at the end of unflatten.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import torch

from gyrostat.engine.state.tensorbytes import DTYPES, count_bytes, is_dense

Node: TypeAlias = Any
"""A JSON value that stands for a state."""

NUMPY_KINDS = frozenset("biufcSUmM")
"""NumPy element types that are stored: booleans, numbers, text, dates. No objects and no records."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that is stored beside the skeleton."""

    name: str
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    stride: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    """None if the tensor is contiguous."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown element type {self.dtype!r}")
        if self.stride is not None and not is_dense(self.shape, self.stride):
            raise ValueError(f"impossible strides {self.stride} for the shape {self.shape}")

    @property
    def size(self) -> int:
        """In bytes."""
        return count_bytes(self.dtype, self.shape)


class Skeleton(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state without the elements of its tensors."""

    tree: Node
    tensors: list[TensorSpec]


@dataclass(frozen=True)
class Flat:
    """A flattened state: its skeleton, and the tensors that the skeleton refers to by number, each with a unique name."""

    skeleton: Skeleton
    tensors: list[tuple[str, torch.Tensor]]
    tied: frozenset[int] = frozenset()
    """The numbers of tensors that occur in several places."""

"""A state without the elements of its tensors, in a form that JSON can hold.

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
    """What a skeleton knows of a tensor that is stored beside it."""

    name: str
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    stride: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    """Only where it is not that of a contiguous tensor."""

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
    """A state taken apart: its skeleton, and the tensors the skeleton counts, each with its unique name."""

    skeleton: Skeleton
    tensors: list[tuple[str, torch.Tensor]]
    tied: frozenset[int] = frozenset()
    """The numbers of tensors that stand in several places."""

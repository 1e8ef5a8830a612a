"""`job.mean(x)`, `job.sum(x)`, `job.gather(x)`: a value of each micro-batch, combined over all virtual workers.

The values travel with the pass's reduction, as float64, and are combined in order of virtual rank and micro-batch, so the
result is the same on every placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import reduce
from typing import Any

import msgspec
import numpy as np
import torch

from gyrostat.core.errors import Misuse


class MeanKind(Enum):
    """How the values of all virtual workers are combined."""

    MEAN = "mean"
    SUM = "sum"
    GATHER = "gather"


class Mean:
    """A handle to a mean, a sum or all values, known after the inner loop."""

    def __init__(self, kind: MeanKind = MeanKind.MEAN) -> None:
        self.kind = kind
        self._value: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        """With the shape and type of the values; of a gather, (N, micro-batches, *shape)."""
        if self._value is None:
            raise Misuse(
                f"job.{self.kind.value}'s result is known only after the inner loop: read it below `for … in step:`"
            )
        return self._value

    def set(self, value: torch.Tensor) -> None:
        """The pass has settled."""
        self._value = value

    def item(self) -> float:
        return float(self.value.item())

    def __float__(self) -> float:
        return self.item()

    def __repr__(self) -> str:
        return "Mean(not yet known)" if self._value is None else f"Mean({self._value.tolist()})"


class MeanWire(msgspec.Struct, frozen=True, array_like=True):
    """The values of one such call on one worker: ranks in order, their micro-batches in order, as float64."""

    ranks: list[int]
    shape: list[int]
    data: bytes


class Means:
    """The calls of one pass on one worker. The j-th call of every micro-batch is one mean, sum or gather."""

    def __init__(self) -> None:
        self._handles: list[Mean] = []
        self._values: list[list[tuple[int, torch.Tensor]]] = []
        self._next = 0

    def begin_micro_batch(self) -> None:
        self._next = 0

    def add(self, rank: int, value: torch.Tensor | float, kind: MeanKind = MeanKind.MEAN) -> Mean:
        if self._next == len(self._handles):
            self._handles.append(Mean(kind))
            self._values.append([])
        handle = self._handles[self._next]
        if handle.kind is not kind:
            raise Misuse(
                f"job.{kind.value} where the micro-batch before called job.{handle.kind.value}; all make the same calls"
            )
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
        self._values[self._next].append((rank, tensor.clone()))
        self._next += 1
        return handle

    def wire(self) -> list[MeanWire]:
        return [
            MeanWire(
                ranks=[rank for rank, _ in values],
                shape=list(values[0][1].shape),
                data=b"".join(value.to("cpu", torch.float64).numpy().tobytes() for _, value in values),
            )
            for values in self._values
        ]

    def settle(
        self, workers: Sequence[list[MeanWire]], weights: Mapping[int, float | None], micro_batches: int
    ) -> None:
        """Set the mean of every handle from the values of all workers. `weights`: of all virtual workers."""
        if len({len(wires) for wires in workers}) != 1:
            raise Misuse(
                f"job.mean, job.sum and job.gather were called {sorted({len(w) for w in workers})} times per micro-batch, not "
                "equally often"
            )
        for call, handle in enumerate(self._handles):
            wires = [wires[call] for wires in workers]
            if (
                sum(len(wire.ranks) for wire in wires) != len(weights) * micro_batches
                or len({tuple(wire.shape) for wire in wires}) != 1
            ):
                raise Misuse(
                    "job.mean, job.sum and job.gather must be called equally often, with values of one shape, in every "
                    "micro-batch"
                )
            rows = [
                (rank, row)
                for wire in wires
                for rank, row in zip(
                    wire.ranks, np.frombuffer(wire.data).reshape(len(wire.ranks), *wire.shape), strict=True
                )
            ]
            rows.sort(key=lambda pair: pair[0])  # stable: micro-batches of a rank stay in order
            like = self._values[call][0][1]
            combined = torch.from_numpy(np.asarray(_combine(handle.kind, rows, weights, micro_batches)))
            keeps_type = like.is_floating_point() or handle.kind is not MeanKind.MEAN
            handle.set(combined.to(like.dtype if keeps_type else torch.float64).to(like.device))


def _combine(
    kind: MeanKind, rows: Sequence[tuple[int, Any]], weights: Mapping[int, float | None], micro_batches: int
) -> Any:
    if kind is MeanKind.MEAN:
        return _average(rows, weights)
    values = np.stack([row for _, row in rows])
    if kind is MeanKind.GATHER:
        return values.reshape(len(weights), micro_batches, *values.shape[1:])
    return reduce(np.add, values)


def _average(rows: Sequence[tuple[int, Any]], weights: Mapping[int, float | None]) -> Any:
    """In rank order. Equal shares are added and divided; others are added by weight."""
    if any(weight is None for weight in weights.values()):
        total = rows[0][1].copy()
        for _, row in rows[1:]:
            total = total + row
        return total / len(rows)
    total = rows[0][1] * weights[rows[0][0]]
    for rank, row in rows[1:]:
        total = total + row * weights[rank]
    return total

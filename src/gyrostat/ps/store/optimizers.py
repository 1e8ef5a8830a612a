"""Optimizers: kernels over (rows, state, gradients), for tables and for dense pieces. Float32, elementwise by row.

The bits of a row depend on the row, its state, its gradient and the update's number alone, never on the other rows of the
update. For rows of tables all are lazy: rows without a gradient do not change. The formulas are those of `torch.optim`
(`SparseAdam` for the rows of tables, `Adam` for dense pieces) up to rounding; FTRL is McMahan et al. 2013.
"""

from __future__ import annotations

from math import sqrt
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyrostat.core.errors import UsageError
from gyrostat.ps.store.hashing import Rows
from gyrostat.ps.store.schedules import Schedule, check_rate, rate_at

Coefficient = np.float32 | NDArray[np.float32]
"""One number for all rows, or a column with one per row: slots may have applied different numbers of updates."""


class Optimizer(Protocol):
    """A kernel, with its settings as fields."""

    def state_width(self, width: int) -> int:
        """Columns of state for a row of `width` columns."""

    def begin(self, rows: Rows) -> Rows:
        """The state of new rows."""

    def coefficients(self, update: int, *, dense: bool) -> tuple[float, ...]:
        """What the kernel needs to know of the update's number, counted from 1."""

    def step(self, rows: Rows, state: Rows, gradients: Rows, coefficients: tuple[Coefficient, ...]) -> None:
        """Change rows and state in place. Gradients may be overwritten."""


class SGD(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`torch.optim.SGD`. With momentum, a row's buffer decays only when the row has a gradient."""

    lr: float | Schedule
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.lr)
        _in_unit("momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov=True needs a momentum of more than 0")

    def state_width(self, width: int) -> int:
        return width if self.momentum else 0

    def begin(self, rows: Rows) -> Rows:
        return np.zeros((len(rows), self.state_width(rows.shape[1])), np.float32)

    def coefficients(self, update: int, *, dense: bool) -> tuple[float, ...]:
        return (rate_at(self.lr, update),)

    def step(self, rows: Rows, state: Rows, gradients: Rows, coefficients: tuple[Coefficient, ...]) -> None:
        (lr,) = coefficients
        if self.weight_decay:
            gradients = gradients + rows * np.float32(self.weight_decay)
        if self.momentum:
            state *= np.float32(self.momentum)
            state += gradients
            gradients = gradients + state * np.float32(self.momentum) if self.nesterov else state
        rows -= gradients * lr


class RowAdagrad(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Adagrad with one accumulator per row: the mean of its squared gradients. 4 bytes of state per row."""

    lr: float | Schedule
    initial: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_rate(self.lr)

    def state_width(self, width: int) -> int:
        return 1

    def begin(self, rows: Rows) -> Rows:
        return np.full((len(rows), 1), self.initial, np.float32)

    def coefficients(self, update: int, *, dense: bool) -> tuple[float, ...]:
        return (rate_at(self.lr, update),)

    def step(self, rows: Rows, state: Rows, gradients: Rows, coefficients: tuple[Coefficient, ...]) -> None:
        (lr,) = coefficients
        state += np.einsum("ij,ij->i", gradients, gradients)[:, None] * np.float32(1 / rows.shape[1])
        rows -= gradients * (lr / (np.sqrt(state) + np.float32(self.eps)))


class Adagrad(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`torch.optim.Adagrad`; its `lr_decay` is `InverseTimeDecay`."""

    lr: float | Schedule
    initial: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_rate(self.lr)

    def state_width(self, width: int) -> int:
        return width

    def begin(self, rows: Rows) -> Rows:
        return np.full(rows.shape, self.initial, np.float32)

    def coefficients(self, update: int, *, dense: bool) -> tuple[float, ...]:
        return (rate_at(self.lr, update),)

    def step(self, rows: Rows, state: Rows, gradients: Rows, coefficients: tuple[Coefficient, ...]) -> None:
        (lr,) = coefficients
        state += gradients * gradients
        rows -= gradients / (np.sqrt(state) + np.float32(self.eps)) * lr


class Adam(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`torch.optim.SparseAdam` for the rows of tables, `torch.optim.Adam` for dense pieces."""

    lr: float | Schedule
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_rate(self.lr)
        _in_unit("beta1", self.beta1)
        _in_unit("beta2", self.beta2)

    def state_width(self, width: int) -> int:
        return 2 * width

    def begin(self, rows: Rows) -> Rows:
        return np.zeros((len(rows), 2 * rows.shape[1]), np.float32)

    def coefficients(self, update: int, *, dense: bool) -> tuple[float, ...]:
        correction = sqrt(1 - self.beta2**update)
        eps = self.eps * correction if dense else self.eps
        return rate_at(self.lr, update) * correction / (1 - self.beta1**update), eps

    def step(self, rows: Rows, state: Rows, gradients: Rows, coefficients: tuple[Coefficient, ...]) -> None:
        step_size, eps = coefficients
        width = rows.shape[1]
        mean, square = state[:, :width], state[:, width:]
        mean += (gradients - mean) * np.float32(1 - self.beta1)
        square += (gradients * gradients - square) * np.float32(1 - self.beta2)
        rows -= mean / (np.sqrt(square) + eps) * step_size


class FTRL(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """FTRL-Proximal: small weights are exactly 0 under `l1`. The state of a new row is that which yields its initial
    values."""

    lr: float | Schedule
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.lr)
        for name in ("beta", "l1", "l2"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} of FTRL must be at least 0, got {getattr(self, name)!r}")

    def state_width(self, width: int) -> int:
        return 2 * width

    def begin(self, rows: Rows) -> Rows:
        scale = np.float32(self.beta / rate_at(self.lr, 1) + self.l2)
        z = -rows * scale - np.sign(rows) * np.float32(self.l1)
        return np.concatenate([z, np.zeros_like(rows)], axis=1)

    def coefficients(self, update: int, *, dense: bool) -> tuple[float, ...]:
        return (1 / rate_at(self.lr, update),)

    def step(self, rows: Rows, state: Rows, gradients: Rows, coefficients: tuple[Coefficient, ...]) -> None:
        (inverse,) = coefficients
        width = rows.shape[1]
        z, n = state[:, :width], state[:, width:]
        root = np.sqrt(n)
        n += gradients * gradients
        new_root = np.sqrt(n)
        z += gradients - (new_root - root) * inverse * rows
        shrunk = np.sign(z) * np.float32(self.l1) - z
        denominator = (new_root + np.float32(self.beta)) * inverse + np.float32(self.l2)
        rows[:] = np.where(np.abs(z) <= np.float32(self.l1), np.float32(0), shrunk / denominator)


AnyOptimizer = SGD | RowAdagrad | Adagrad | Adam | FTRL


def coefficient_columns(
    optimizer: Optimizer, updates: NDArray[np.int64], *, dense: bool
) -> tuple[Coefficient, ...]:
    """The coefficients of rows whose slots are at these update numbers: numbers if all are equal, else columns."""
    if len(updates) and updates.min() == updates.max():
        return tuple(np.float32(each) for each in optimizer.coefficients(int(updates[0]), dense=dense))
    distinct, inverse = np.unique(updates, return_inverse=True)
    by_update = [optimizer.coefficients(update, dense=dense) for update in distinct.tolist()]
    return tuple(np.array(each, np.float32)[inverse][:, None] for each in zip(*by_update, strict=True))


def _in_unit(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UsageError(f"{name} must be at least 0 and less than 1, got {value!r}")

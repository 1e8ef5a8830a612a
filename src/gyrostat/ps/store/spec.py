"""What a job keeps on its servers: its tables and dense tensors, and the number of slots. Sent to every process, never
changed."""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np

from gyrostat.core.errors import UsageError
from gyrostat.ps.store.hashing import MAX_SLOTS, Keys, Rows, uniform_rows
from gyrostat.ps.store.optimizers import AnyOptimizer

_MOST_WIDTH = 1 << 16
_MOST_ELEMENTS = 1 << 34


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A table of rows by 64-bit id."""

    name: str
    width: int
    optimizer: AnyOptimizer
    initial_scale: float = 0.0625
    """New rows are uniform in [-scale, scale), a pure function of the job's seed, the table's name and the id."""
    seed: int = 0
    enter_after: int = 1
    """A row is made at the push of its `enter_after`th gradient; earlier ones are dropped, and pulls return its initial
    values."""
    expire_after: int = 0
    """A row without a gradient for this many updates of its slot is removed, at multiples of this number; 0: never."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_range("width", self.width, 1, _MOST_WIDTH)
        _check_range("enter_after", self.enter_after, 1, 2**31)
        _check_range("expire_after", self.expire_after, 0, 2**62)
        if self.initial_scale < 0:
            raise UsageError(f"initial_scale must be at least 0, got {self.initial_scale!r}")

    def initial(self, keys: Keys) -> Rows:
        """The rows that these keys begin with."""
        if self.initial_scale == 0:
            return np.zeros((len(keys), self.width), np.float32)
        return uniform_rows(keys, self.width, self.seed, self.initial_scale)


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A dense tensor, or several in a row, of `size` elements in all. It is cut into one piece per slot; the last is
    padded with 0."""

    name: str
    size: int
    optimizer: AnyOptimizer
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of the tensors in the row, for exports; none: it is one."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_range("size", self.size, 1, _MOST_ELEMENTS)
        if self.parameters and sum(prod(shape) for _, shape in self.parameters) != self.size:
            raise UsageError(f"the parameters of {self.name!r} do not have {self.size} elements together")

    def piece(self, slots: int) -> int:
        """Elements per slot."""
        return -(-self.size // slots)


class StepOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Of a job with bounded staleness: which batches form a step. Steps are numbered over all epochs."""

    staleness: int
    """A batch of step s is computed with all steps before s - staleness applied."""
    virtual_workers: int
    """Batches of a step; the last step of an epoch may have fewer."""
    batches: int
    """Of an epoch."""

    def __post_init__(self) -> None:
        _check_range("staleness", self.staleness, 0, 2**20)
        _check_range("virtual_workers", self.virtual_workers, 1, 2**20)
        _check_range("batches", self.batches, 1, 2**62)

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.batches // self.virtual_workers)

    def place(self, epoch: int, batch: int) -> tuple[int, int]:
        """The step and the virtual rank of a batch."""
        return epoch * self.steps + batch // self.virtual_workers, batch % self.virtual_workers

    def size(self, step: int) -> int:
        """The number of batches of a step."""
        return min(self.virtual_workers, self.batches - step % self.steps * self.virtual_workers)


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that the slots of a job hold. Positions in these tuples name tables in frames."""

    slots: int
    """V: a power of two, at least four times the most server cores that the job may get."""
    tables: tuple[TableSpec, ...] = ()
    dense: tuple[DenseSpec, ...] = ()
    order: StepOrder | None = None
    """None: every update is applied when it comes."""
    record: bool = False
    """Servers write down which updates they apply (`record.py`)."""

    def __post_init__(self) -> None:
        _check_range("slots", self.slots, 1, MAX_SLOTS)
        if self.slots & (self.slots - 1):
            raise UsageError(f"the number of slots must be a power of two, got {self.slots}")
        names = [table.name for table in self.tables] + [dense.name for dense in self.dense]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"two tables or tensors have the name {twice[0]!r}; give each its own")


def _check_name(name: str) -> None:
    if not name or not name.replace("_", "a").replace("-", "a").isalnum() or len(name) > 200:
        raise UsageError(f"a name has letters, digits, '_' and '-' only, got {name!r}")


def _check_range(what: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{what} must be a whole number from {least} to {most}, got {value!r}")

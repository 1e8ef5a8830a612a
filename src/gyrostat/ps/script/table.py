"""`ServerTable`: a table of rows on servers, called with ids like an embedding."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from gyrostat.core.errors import UsageError
from gyrostat.ps.store.spec import TableSpec

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class RowSource(Protocol):
    """Pulls the rows of ids, for the batch that is running."""

    def rows_of(self, table: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct rows, which collect gradients, and of each id the number of its row, in the shape of `ids`."""


class ServerTable:
    """A table. Rows are made when first used; any 64-bit integer is an id."""

    def __init__(self, number: int, spec: TableSpec, source: RowSource) -> None:
        self._number, self.spec, self._source = number, spec, source

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def width(self) -> int:
        return self.spec.width

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids of any shape: one more dimension, of `width`. As `nn.Embedding`."""
        rows, places = self._source.rows_of(self._number, _checked(self.name, ids))
        # The bits of F.embedding, whose backward takes several times as long.
        return rows.index_select(0, places.reshape(-1)).view(*places.shape, -1)

    def bag(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        *,
        mode: str = "sum",
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum or mean of the rows of each bag, as `nn.EmbeddingBag`: a bag is a row of 2-dimensional ids, or begins at each
        of `offsets` into 1-dimensional ones. `weights` (with "sum"): of each id."""
        if mode not in ("sum", "mean"):
            raise UsageError(f'table {self.name!r}: mode must be "sum" or "mean", got {mode!r}')
        if ids.dim() != (2 if offsets is None else 1):
            raise UsageError(
                f"table {self.name!r}: bags are 2-dimensional ids, or 1-dimensional ones with offsets; got ids of shape "
                f"{tuple(ids.shape)} {'without' if offsets is None else 'with'} offsets"
            )
        rows, places = self._source.rows_of(self._number, _checked(self.name, ids))
        # In what order torch adds the gradients of a row depends on the numbers of rows: with these they are in the order of
        # ids, and the bits are those of `nn.EmbeddingBag`.
        distinct, numbers = torch.unique(ids, return_inverse=True)
        by_id = torch.empty_like(distinct, dtype=torch.int64)
        by_id[numbers.flatten()] = places.flatten()
        return F.embedding_bag(
            numbers, F.embedding(by_id, rows), offsets, mode=mode, per_sample_weights=weights
        )

    def __repr__(self) -> str:
        return f"ServerTable({self.name!r}, width={self.width})"


def _checked(table: str, ids: torch.Tensor) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _INTEGERS:
        got = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise UsageError(f"table {table!r} takes a tensor of integer ids, got {got}")
    return ids

"""A copy of a snapshot in host memory, to be written while training changes the original.

The memory is as large as the state. It is allocated with the first copy and used again for later ones: to touch fresh pages
takes several times as long as to copy. `prepare` allocates it in the background before the first copy. Beside an accelerator it
is page-locked, which makes transfers fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from gyrostat.engine.checkpoint.latecopy import LateCopy, choose
from gyrostat.engine.checkpoint.snapshot import FlatSnapshot
from gyrostat.engine.state.flatcopy import copy_rows, flat_in, rows_of, size_of

_PAGE = 4096


class HostCopy:
    """Memory for one copy at a time."""

    def __init__(self) -> None:
        self._shared = self._contexts = torch.empty(0, dtype=torch.uint8)

    def prepare(self, size: int) -> None:
        """Allocate memory for `size` bytes of shared state, before the first copy. Takes a while."""
        block = _large_enough(self._shared, size)
        block[::_PAGE] = 0
        self._shared = block

    def fill(self, snapshot: FlatSnapshot, steady: Iterable[torch.Tensor] = ()) -> LateCopy:
        """Copy a snapshot over the last one, except tensors of `steady` that may be copied later. Returns the copy of those."""
        self._shared = _large_enough(self._shared, size_of(snapshot.shared.skeleton))
        self._contexts = _large_enough(self._contexts, size_of(snapshot.contexts.skeleton))
        rows = [*rows_of(self._shared, snapshot.shared), *rows_of(self._contexts, snapshot.contexts)]
        tied = {snapshot.shared.tensors[number][0] for number in snapshot.shared.tied}
        late = choose(rows, steady, tied)
        copy_late, later = LateCopy(late), set(map(id, late))
        copy_rows([row for row in rows if id(row) not in later], parallel=True)
        return copy_late

    def copied(self, snapshot: FlatSnapshot) -> FlatSnapshot:
        """The snapshot that was copied last, with the tensors of the copy."""
        return replace(
            snapshot,
            shared=flat_in(self._shared, snapshot.shared),
            contexts=flat_in(self._contexts, snapshot.contexts),
        )


def _large_enough(block: torch.Tensor, size: int) -> torch.Tensor:
    if block.numel() >= size:
        return block
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

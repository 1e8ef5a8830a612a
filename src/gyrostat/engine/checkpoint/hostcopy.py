"""A copy of a snapshot in host memory: what is written while training goes on and changes the original.

The memory is as large as the state. It is allocated when the first copy is made and used again for the next, so that only the
first one pays for fresh pages, which takes several times as long as to copy; or nobody does, where it is known before that
there will be one (`prepare`). Beside an accelerator it is page-locked, which transfers need to be fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from gyrostat.engine.checkpoint.latecopy import LateCopy, choose
from gyrostat.engine.checkpoint.snapshot import FlatSnapshot
from gyrostat.engine.state.flatcopy import copy_rows, flat_in, room_for, rows_of

_PAGE = 4096


class HostCopy:
    """Room for one copy at a time."""

    def __init__(self) -> None:
        self._shared = self._contexts = torch.empty(0, dtype=torch.uint8)

    def prepare(self, size: int) -> None:
        """Before the first one: make room for so many bytes of shared state. Takes a while."""
        block = _with_room(self._shared, size)
        block[::_PAGE] = 0
        self._shared = block

    def fill(self, snapshot: FlatSnapshot, steady: Iterable[torch.Tensor] = ()) -> LateCopy:
        """Copy it, over the last one, but for what is `steady`. Returns what is still to be copied."""
        self._shared = _with_room(self._shared, room_for(snapshot.shared.skeleton))
        self._contexts = _with_room(self._contexts, room_for(snapshot.contexts.skeleton))
        rows = [*rows_of(self._shared, snapshot.shared), *rows_of(self._contexts, snapshot.contexts)]
        tied = {snapshot.shared.tensors[number][0] for number in snapshot.shared.tied}
        late = choose(rows, steady, tied)
        copy_late, later = LateCopy(late), set(map(id, late))
        copy_rows([row for row in rows if id(row) not in later], in_a_hurry=True)
        return copy_late

    def of(self, snapshot: FlatSnapshot) -> FlatSnapshot:
        """The snapshot that was last copied, with the tensors of the copy."""
        return replace(
            snapshot,
            shared=flat_in(self._shared, snapshot.shared),
            contexts=flat_in(self._contexts, snapshot.contexts),
        )


def _with_room(block: torch.Tensor, size: int) -> torch.Tensor:
    if block.numel() >= size:
        return block
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

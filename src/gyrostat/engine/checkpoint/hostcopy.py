"""A copy of a snapshot in host memory: what is written while training goes on and changes the original.

The memory is one block, allocated when the first copy is made and used again for the next, so that only the first one
pays for fresh pages. It is as large as the state. Beside an accelerator it is page-locked, which transfers need to be
fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from gyrostat.engine.checkpoint.latecopy import LateCopy, choose
from gyrostat.engine.checkpoint.snapshot import FlatSnapshot
from gyrostat.engine.flatcopy import copy_rows, flat_in, room_for, rows_of


class HostCopy:
    """Room for one copy at a time."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def fill(self, snapshot: FlatSnapshot, steady: Iterable[torch.Tensor] = ()) -> LateCopy:
        """Copy it, over the last one, but for what is `steady`. Returns what is still to be copied."""
        middle = room_for(snapshot.shared.skeleton)
        needed = middle + room_for(snapshot.contexts.skeleton)
        if self._block.numel() < needed:
            self._block = torch.empty(0, dtype=torch.uint8)  # let the old one go first
            self._block = torch.empty(needed, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        rows = [
            *rows_of(self._block[:middle], snapshot.shared),
            *rows_of(self._block[middle:], snapshot.contexts),
        ]
        tied = {snapshot.shared.tensors[number][0] for number in snapshot.shared.tied}
        late = choose(rows, steady, tied)
        copy_late, later = LateCopy(late), set(map(id, late))
        copy_rows([row for row in rows if id(row) not in later], in_a_hurry=True)
        return copy_late

    def of(self, snapshot: FlatSnapshot) -> FlatSnapshot:
        """The snapshot that was last copied, with the tensors of the copy."""
        middle = room_for(snapshot.shared.skeleton)
        return replace(
            snapshot,
            shared=flat_in(self._block[:middle], snapshot.shared),
            contexts=flat_in(self._block[middle:], snapshot.contexts),
        )

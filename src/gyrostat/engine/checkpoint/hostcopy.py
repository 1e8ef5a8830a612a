"""A copy of a snapshot in host memory: what is written while training goes on and changes the original.

The memory is one block, allocated when the first copy is made and used again for the next, so that only the first one
pays for fresh pages. It is as large as the state. Beside an accelerator it is page-locked, which transfers need to be
fast.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gyrostat.engine.checkpoint.snapshot import FlatSnapshot
from gyrostat.engine.flatcopy import copy_into, room_for


class HostCopy:
    """Room for one copy at a time."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def fill(self, snapshot: FlatSnapshot) -> FlatSnapshot:
        """The same snapshot with tensors of its own. They are overwritten by the next `fill`."""
        needed = sum(room_for(flat.skeleton) for flat in (snapshot.shared, snapshot.contexts))
        if self._block.numel() < needed:
            self._block = torch.empty(0, dtype=torch.uint8)  # let the old one go first
            self._block = torch.empty(needed, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        middle = room_for(snapshot.shared.skeleton)
        return replace(
            snapshot,
            shared=copy_into(self._block[:middle], snapshot.shared, in_a_hurry=True),
            contexts=copy_into(self._block[middle:], snapshot.contexts),
        )

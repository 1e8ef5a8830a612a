"""The state of one virtual worker that is not shared, and moves with it: a few kilobytes.

Parameters, optimizer state and synchronised buffers are shared by all virtual workers of a worker and never saved here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gyrostat.data.position import Position
from gyrostat.data.rng import RngState


@dataclass
class Context:
    """The state of one virtual worker between its micro-batches."""

    rng: RngState
    buffers: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By module: its own buffers, kept only if the module's next forward does not overwrite them."""
    local: dict[str, Any] = field(default_factory=dict)
    """`step.local`."""
    data: dict[int, Position] = field(default_factory=dict)
    """By loader: its position, with the states of its data workers."""

    def to_tree(self) -> dict[str, Any]:
        return {
            "rng": self.rng.to_tree(),
            "buffers": self.buffers,
            "local": self.local,
            "data": {number: position.to_tree() for number, position in self.data.items()},
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Context:
        return cls(
            rng=RngState.from_tree(tree["rng"]),
            buffers=tree["buffers"],
            local=tree["local"],
            data={number: Position.from_tree(position) for number, position in tree.get("data", {}).items()},
        )

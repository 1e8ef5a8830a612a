"""`Update`: the gradients of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gyrostat.ps.store.hashing import Keys, Rows
from gyrostat.ps.store.ledger import Slots


@dataclass(frozen=True)
class Update:
    """The gradients of one batch, for some slots."""

    epoch: int
    batch: int
    """First sample // batch size."""
    slots: Slots
    """The slots that it is for, ascending. Rows of other slots are ignored."""
    rows: Mapping[int, tuple[Keys, Rows]] = field(default_factory=dict)
    """By number of the table: keys and their gradients."""
    dense: Mapping[int, Rows] = field(default_factory=dict)
    """By number of the tensor: one row per slot."""
    origin: bytes = b""
    """If updates are recorded: what it was computed from. Opaque here."""

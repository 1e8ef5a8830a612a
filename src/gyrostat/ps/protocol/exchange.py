"""What a worker and a server say to one another about rows and gradients: one request, one reply, for some slots of one
server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from gyrostat.ps.store.hashing import Keys, Rows
from gyrostat.ps.store.ledger import Flags, Slots, Versions
from gyrostat.ps.store.slot_store import Update


class ExchangeStatus(IntEnum):
    """The result for all slots of the request. Anything but DONE has changed nothing."""

    DONE = 0
    """For `ExchangeReply.served`, if that is given: other slots are moving, and need not be waited for."""
    MOVED = 1
    """This server does not own all of the slots: look at the map and send to those that do."""
    STALE = 2
    """Of a term that is over: drop the update, and ask for another shard."""
    AHEAD = 3
    """This server has not reached that term yet: repeat."""
    WITHOUT_VALUES = 4
    """Dense pieces have no values yet: repeat, with initial values."""


@dataclass(frozen=True)
class BatchRange:
    """Batches `first` … `first + count - 1` of an epoch."""

    epoch: int
    first: int
    count: int


@dataclass(frozen=True)
class Exchange:
    """A push, then a pull, of the same slots; each may be empty."""

    term: int
    slots: Slots
    """Ascending."""
    push: Update | None = None
    """Its slots are those above."""
    pull_rows: Mapping[int, Keys] = field(default_factory=dict)
    """By number of the table."""
    pull_dense: tuple[int, ...] = ()
    """Numbers of tensors."""
    begin_dense: Mapping[int, Rows] = field(default_factory=dict)
    """Initial values, for pieces that have none."""
    which_applied: BatchRange | None = None
    """Asks which of these batches all the slots have."""
    committed: int = 0
    """In ordered jobs: all batches of the steps before this one are reported, so that every slot has them. The slots apply
    these steps before they push and pull."""


@dataclass(frozen=True)
class ExchangeReply:
    status: ExchangeStatus
    rows: Mapping[int, Rows] = field(default_factory=dict)
    dense: Mapping[int, Rows] = field(default_factory=dict)
    """One row per slot."""
    applied: Flags = field(default_factory=lambda: np.zeros(0, bool))
    duplicates: int = 0
    """Slots that had the update already."""
    versions: Versions = field(default_factory=lambda: np.zeros(0, np.int64))
    """If updates are recorded: how many updates each slot has applied."""
    served: Slots = field(default_factory=lambda: np.zeros(0, np.int64))
    """Empty: all slots of the exchange. Otherwise these: the reply has their rows and pieces only."""

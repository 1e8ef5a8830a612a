"""What a server process has done, in total and by slot."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from gyrostat.ps.protocol.exchange import Exchange
from gyrostat.ps.protocol.slot_server import SlotServer
from gyrostat.ps.store.hashing import slot_bounds
from gyrostat.ps.wire.control import ServerLoad

_PAGE = 4096
_SAMPLED = 8
"""Exchanges whose time is divided among slots at once: counting rows by slot takes a few percent of an exchange."""


class LoadMeter:
    """Counts requests, rows and busy seconds."""

    def __init__(self, slots: int) -> None:
        self._began = time.monotonic()
        self._slots = np.zeros(slots)
        self._busy = self._undivided = 0.0
        self._requests = self._work = 0

    def served(self, exchange: Exchange, seconds: float) -> None:
        """An exchange took this long. Slots share the time of some exchanges by the rows that the last of them had of each."""
        keys = list(exchange.pull_rows.values())
        if exchange.push is not None:
            keys += [each for each, _ in exchange.push.rows.values()]
        self._busy += seconds
        self._undivided += seconds
        self._requests += 1
        self._work += sum(map(len, keys))
        if self._requests % _SAMPLED == 0:
            weights = np.zeros(len(self._slots))
            weights[exchange.slots] = 1.0
            for each in keys:
                weights += np.maximum(np.diff(slot_bounds(each, len(self._slots))), 0)
            self._slots += weights * (self._undivided / weights.sum())
            self._undivided = 0.0

    def to_load(self, server: SlotServer) -> ServerLoad:
        store = server.store
        return ServerLoad(
            seconds=time.monotonic() - self._began,
            busy=self._busy,
            cpu=time.process_time(),
            requests=self._requests,
            work=self._work,
            rows=store.rows,
            payload=store.payload_bytes,
            memory=resident_bytes(),
            slots={slot: float(self._slots[slot]) for slot in store.slots},
        )


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE

"""Hot and slow servers: what to do about one, and the evidence. Pure.

All servers take part in every step, so workers wait for the one that answers last. Why it does decides what helps (DLRover,
section 5.4): it has more load than others → some of its slots move, or it gets another core if no slot can move; it has the
same load → its machine is slow, and another server takes its place. `ServerPolicy` is the interface: an optimizer service can
decide in place of `StragglerRule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Protocol

MORE = 1.5
"""Times the median of the others: a difference that is no accident."""
WAITED = 0.1
"""Of the workers' time: so much longer than for others they wait for a server before something is done about it."""
ONE_SLOT = 0.5
"""Of a server's load: if one slot has more of it, moving others does not help."""


class Remedy(StrEnum):
    MOVE_SLOTS = "move slots"
    MORE_CORES = "more cores"
    REPLACE = "replace"


@dataclass(frozen=True, kw_only=True)
class ServerObservation:
    """One server, over the last seconds."""

    name: str
    cores: int
    seconds: float
    busy: float
    """The share of the time in which it worked on requests, per core."""
    cpu: float
    """The CPU time that it got, as a share of the time in which it worked: less than 1 if it has to wait for a core."""
    rows: float
    """Rows pulled and pushed, per second and core: its load, however fast it is."""
    waited: float
    """Of the workers' time, the share in which they waited for it."""
    response_ms: float
    """How long a worker waited for it per exchange."""
    heaviest_slot: float
    """Of its busy time, the share of the slot with the largest one."""

    @property
    def evidence(self) -> str:
        return (
            f"{self.name}: {self.cores} cores, answers within {self.response_ms:.1f} ms, workers wait for it for "
            f"{self.waited:.0%} of their time; {self.busy:.0%} busy, {self.rows:,.0f} rows/s per core, "
            f"CPU for {self.cpu:.0%} of the busy time"
        )


@dataclass(frozen=True, kw_only=True)
class Treatment:
    server: str
    remedy: Remedy
    reason: str
    evidence: tuple[str, ...]


class ServerPolicy(Protocol):
    """Decides about servers."""

    def decide(self, servers: Sequence[ServerObservation]) -> Treatment | None:
        """What should be done now; None: nothing."""


class StragglerRule:
    """The fixed rule."""

    def decide(self, servers: Sequence[ServerObservation]) -> Treatment | None:
        if len(servers) < 2:
            return None
        last = max(servers, key=lambda each: each.waited)
        others = [each for each in servers if each is not last]
        waited = median(each.waited for each in others)
        if last.waited < MORE * waited or last.waited < waited + WAITED:
            return None
        found = (
            f"workers wait for {last.name} for {last.waited:.0%} of their time, for the others {waited:.0%}"
        )
        rows = median(each.rows for each in others)
        if last.rows < MORE * rows:
            why = f"{found}: it has their load, so its machine is slow; another server takes its place"
            return _treatment(last, Remedy.REPLACE, why, servers)
        load = f"{found}: it has {last.rows / max(1.0, rows):.1f} times their load"
        if last.heaviest_slot < ONE_SLOT:
            return _treatment(last, Remedy.MOVE_SLOTS, f"{load}; some of its slots move", servers)
        why = f"{load}, {last.heaviest_slot:.0%} of it in one slot; it gets another core"
        return _treatment(last, Remedy.MORE_CORES, why, servers)


def _treatment(
    server: ServerObservation, remedy: Remedy, reason: str, servers: Sequence[ServerObservation]
) -> Treatment:
    evidence = tuple(each.evidence for each in servers)
    return Treatment(server=server.name, remedy=remedy, reason=reason, evidence=evidence)

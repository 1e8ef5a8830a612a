"""Quotas: the number of devices of each type that a VC's guaranteed jobs may hold, wherever these devices are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gyrostat.core.devices import Counts
from gyrostat.sched.placers.base import PlacementRefused


class Quotas:
    """Limits by VC and type, and their use. Without limits nothing is counted or refused."""

    def __init__(self, limits: Mapping[str, Counts] | None) -> None:
        self.limits = limits
        self._used: dict[tuple[str, str], int] = {}

    def left(self, vc: str, type_: str) -> float:
        """Devices that the VC may still allocate; infinite without limits."""
        if self.limits is None:
            return math.inf
        return self.limits.get(vc, {}).get(type_, 0) - self._used.get((vc, type_), 0)

    def count(self, vc: str, type_: str, change: int) -> None:
        """Record that the VC's guaranteed jobs hold `change` more devices."""
        if self.limits is not None:
            self._used[vc, type_] = self._used.get((vc, type_), 0) + change

    def refusal(self, vc: str, more: Counts) -> PlacementRefused | None:
        """Why the VC may not allocate these devices; None if it may."""
        if self.limits is None:
            return None
        for type_, number in more.items():
            if number > (left := self.left(vc, type_)):
                quota = self.limits.get(vc, {}).get(type_, 0)
                return PlacementRefused(
                    f"{number} {type_} requested, {left} left of the VC's quota of {quota}"
                )
        return None

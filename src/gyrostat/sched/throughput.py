"""The throughput of a job by its devices: what policies expect, and what the simulator computes with.

Rates are relative: 1.0 is the job on the devices that it requests, of the reference type, well placed. That is all that a
trace says about speed: how long the job took there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gyrostat.core.devices import Counts
from gyrostat.core.request import JobRequest
from gyrostat.sched.planner.companion import Companion


class Throughput(Protocol):
    def rate(self, request: JobRequest, counts: Counts) -> float:
        """Units of work per second on these devices, well placed; 0 if the job cannot run on them."""

    def companion(self, request: JobRequest) -> Companion | None:
        """A companion with the job's profile, which measurements can correct. None: there is no profile."""


@dataclass(frozen=True, kw_only=True)
class AnalyticScaling:
    """The speedup of p devices is p / (1 + overhead · (p - 1))."""

    overhead: float = 0.0
    """The share by which each further device slows all of them. 0: linear scaling."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Speed of device types relative to the reference type; 1 for types that are not listed."""

    def rate(self, request: JobRequest, counts: Counts) -> float:
        if len(counts) == 1:
            ((type_, devices),) = counts.items()
            if devices == request.devices:
                return self.speeds.get(type_, 1.0)
        return self._speed(request, counts) / self._speedup(request, request.devices)

    def companion(self, request: JobRequest) -> Companion | None:
        return None

    def _speed(self, request: JobRequest, counts: Counts) -> float:
        devices = sum(counts.values())
        if not devices:
            return 0.0
        mean = sum(self.speeds.get(type_, 1.0) * number for type_, number in counts.items()) / devices
        return mean * self._speedup(request, devices)

    def _speedup(self, request: JobRequest, devices: int) -> float:
        if request.virtual_workers is not None:
            used = min(devices, request.virtual_workers)
            return (
                request.virtual_workers
                / -(-request.virtual_workers // used)
                / (1 + self.overhead * (used - 1))
            )
        return devices / (1 + self.overhead * (devices - 1))

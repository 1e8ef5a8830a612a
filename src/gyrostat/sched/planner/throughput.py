"""Expected throughput of jobs from profiles: the planner's best split, behind `sched.throughput.Throughput`.

A workload is named as in Gavel's tables, `ResNet-50 (batch size 64)`: a profile's name and the samples per virtual worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gyrostat.core.devices import Counts
from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile
from gyrostat.core.request import JobRequest
from gyrostat.sched.planner.companion import Companion

_WORKLOAD = re.compile(r"(?P<profile>.+) \(batch size (?P<batch>[1-9]\d{0,8})\)", re.DOTALL)


def is_workload(name: str) -> bool:
    return _WORKLOAD.fullmatch(name) is not None


def workload_name(profile: str, batch: int) -> str:
    return f"{profile} (batch size {batch})"


def profile_and_batch(request: JobRequest) -> tuple[str, int]:
    """The workload of a job: a profile's name, and the samples of each virtual worker."""
    match = _WORKLOAD.fullmatch(request.workload or "")
    if match is None:
        raise UsageError(
            f"job {request.id} trains {request.workload!r}; a workload is written NAME (batch size N)"
        )
    return match["profile"], int(match["batch"])


def companion_of(request: JobRequest, profile: Profile, batch: int, *, anchored: bool = True) -> Companion:
    """The companion of a job with this profile."""
    return Companion(
        profile=profile,
        batch=batch,
        virtual_workers=_virtual_workers(request),
        mixed=request.mixes_types,
        anchored=anchored,
    )


class PlannedThroughput:
    """Steps per second of any job on any devices, well split (a `sched.throughput.Throughput`)."""

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        self._profiles = profiles
        self._companions: dict[object, Companion] = {}
        self._rates: dict[object, float] = {}

    def rate(self, request: JobRequest, counts: Counts) -> float:
        key = (request.workload, _virtual_workers(request), request.mixes_types, *counts.items())
        rate = self._rates.get(key)
        if rate is None:
            companion = self.companion(request)
            rate = self._rates[key] = companion.throughput(counts) / companion.virtual_workers
        return rate

    def companion(self, request: JobRequest) -> Companion:
        """The companion of such a job before any measurement."""
        key = (request.workload, _virtual_workers(request), request.mixes_types)
        if key not in self._companions:
            name, batch = profile_and_batch(request)
            if name not in self._profiles:
                raise UsageError(
                    f"job {request.id} trains {request.workload!r}, which has no profile; known are "
                    f"{', '.join(self._profiles)}, written NAME (batch size N)"
                )
            self._companions[key] = companion_of(request, self._profiles[name], batch)
        return self._companions[key]


def _virtual_workers(request: JobRequest) -> int:
    return request.virtual_workers or request.largest

"""Expected throughput of jobs by their profiles: the planner's best split, as schedulers and the simulator ask for it.

A workload is called as in Gavel's tables, `ResNet-50 (batch size 64)`: a profile's name and the samples per virtual worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gyrostat.core.devices import Counts
from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile
from gyrostat.core.request import JobRequest
from gyrostat.sched.planner.companion import Companion

_WORKLOAD = re.compile(r"^(?P<profile>.+) \(batch size (?P<batch>\d+)\)$")


def workload_name(profile: str, batch: int) -> str:
    return f"{profile} (batch size {batch})"


class PlannedThroughput:
    """Steps per second of any job on any devices, well split (a `sched.throughput.Throughput`)."""

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        self._profiles = profiles
        self._companions: dict[object, Companion] = {}
        self._rates: dict[object, float] = {}

    def rate(self, request: JobRequest, counts: Counts) -> float:
        virtual_workers = request.virtual_workers or request.largest
        key = (request.workload, virtual_workers, request.mixes_types, *counts.items())
        rate = self._rates.get(key)
        if rate is None:
            split = self.companion(request).best(counts)
            rate = self._rates[key] = 0.0 if split is None else 1 / split.step
        return rate

    def companion(self, request: JobRequest) -> Companion:
        """What plans for such a job."""
        virtual_workers = request.virtual_workers or request.largest
        key = (request.workload, virtual_workers, request.mixes_types)
        if key not in self._companions:
            match = _WORKLOAD.match(request.workload or "")
            if match is None or match["profile"] not in self._profiles:
                raise UsageError(
                    f"job {request.id} trains {request.workload!r}, for which there is no profile; there are "
                    f"{', '.join(self._profiles)}, written NAME (batch size N)"
                )
            self._companions[key] = Companion(
                profile=self._profiles[match["profile"]],
                batch=int(match["batch"]),
                virtual_workers=virtual_workers,
                mixed=request.mixes_types,
            )
        return self._companions[key]

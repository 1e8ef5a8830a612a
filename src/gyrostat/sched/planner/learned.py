"""Expected throughput of jobs of which no profile exists: on a live cluster. Measurements correct it (`sched.estimates`).

Until a job has been measured, its speed on a device type is taken to be in proportion to what the cluster declares of that type
(the pace of its slots), or equal on all types; and to grow with the devices as far as virtual workers can be divided. The
first measurement sets the scale of all types, later ones correct those in use. Jobs of a workload that has run before begin
with what was measured then.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyrostat.core.devices import Counts
from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import JobRequest
from gyrostat.sched.planner.companion import Companion
from gyrostat.sched.planner.throughput import companion_of, profile_and_batch


class LearnedThroughput:
    """Steps per second, up to a factor that measurements find (a `sched.throughput.Throughput`)."""

    def __init__(self, speeds: Mapping[str, float]) -> None:
        """`speeds`: of every device type, relative to the others."""
        self._speeds = speeds
        self._companions: dict[object, Companion] = {}

    def rate(self, request: JobRequest, counts: Counts) -> float:
        companion = self.companion(request)
        return companion.throughput(counts) / companion.virtual_workers

    def companion(self, request: JobRequest) -> Companion:
        key = (request.workload, request.virtual_workers or request.largest, request.mixes_types)
        if key not in self._companions:
            name, batch = profile_and_batch(request)
            speeds = {type_: Speed(((batch, speed),)) for type_, speed in self._speeds.items()}
            self._companions[key] = companion_of(request, Profile(name, speeds), batch, anchored=False)
        return self._companions[key]

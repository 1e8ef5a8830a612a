"""The scheduler's estimates of job throughput: from profiles, from the history of a workload, and from measurements.

A cluster reports a job's throughput on its present devices (`port.Progressed`). When that differs from the estimate, the
job gets a companion of its own (EasyScale §3.4), which the measurement corrects and which estimates for the job from then
on (`JobView.companion`). Measurements of finished jobs are kept by workload and device type; later jobs of the workload
start with their median where it differs from the profile by more than `companion.BIAS`, and jobs of a workload without a
profile start with the ratios between device types that other workloads had (`planner.history`).

While measurements agree with profiles, all of this is free. Jobs without a profile are estimated by a formula, whatever
they report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile
from gyrostat.core.request import JobRequest
from gyrostat.sched.planner.companion import BIAS, Companion, devices_key
from gyrostat.sched.planner.history import Observation, seed_profile
from gyrostat.sched.planner.throughput import companion_of, profile_and_batch
from gyrostat.sched.throughput import Throughput
from gyrostat.sched.views import JobView

_HISTORY = 32
"""Observations kept per workload, batch size and device type: the latest."""


class Estimates:
    """The estimates of one scheduler; `sched.state` updates them."""

    def __init__(
        self, throughput: Throughput, types: tuple[str, ...], history: Iterable[Observation] = ()
    ) -> None:
        """`types`: the device types of the cluster. `history`: what was measured before this scheduler started."""
        self._throughput = throughput
        self._types = types
        self._history: dict[tuple[str, int, str], deque[Observation]] = {}
        self.fresh: list[Observation] = []
        """Observations of this scheduler, for a cluster that keeps them; it empties the list."""
        for each in history:
            self._keep(each)
        self._corrected = bool(self._history)
        """Whether any measurement has ever differed from its estimate."""

    def submitted(self, job: JobView) -> None:
        """Give a new job a companion if the history of its workload differs from its profile."""
        if self._corrected and job.request.workload is not None:
            job.companion = self._seeded(job.request)

    def measured(self, job: JobView, rate: float) -> bool:
        """Record the measured rate of a job on its present devices. Returns whether that changes its estimates."""
        if rate <= 0 or job.request.workload is None:
            return False
        counts = job.all_counts()
        if job.companion is None and rate == self._throughput.rate(job.request, counts):
            job.measured[devices_key(counts)] = rate
            return False
        companion = job.companion or self._throughput.companion(job.request)
        if companion is None:
            return False
        expected = companion.throughput(counts)
        found = rate * companion.virtual_workers
        facts = {key: known * companion.virtual_workers for key, known in job.measured.items()}
        job.measured[devices_key(counts)] = rate
        job.companion = replace(companion, facts={**facts, **companion.facts}).measured(counts, found)
        self._corrected = True
        return expected <= 0 or abs(found / expected - 1) > BIAS or bool(unhelpful(job))

    def finished(self, job: JobView) -> None:
        """Add the measurements of a finished job to the history."""
        if not self._corrected or job.request.workload is None:
            return
        companion = job.companion or self._throughput.companion(job.request)
        if companion is None:
            return
        for key, rate in job.measured.items():
            if len(key) == 1 and (split := companion.best(dict(key))) is not None:
                ((type_, _),) = key
                seconds = (1 / rate - split.exchange) / split.shares[0].most
                if seconds > 0:
                    self._record(companion, type_, companion.batch / seconds)

    def _record(self, companion: Companion, type_: str, samples: float) -> None:
        observation = Observation(companion.profile.workload, type_, companion.batch, samples)
        self._keep(observation)
        self.fresh.append(observation)

    def _keep(self, seen: Observation) -> None:
        key = (seen.workload, seen.batch, seen.type)
        self._history.setdefault(key, deque(maxlen=_HISTORY)).append(seen)

    def _seeded(self, request: JobRequest) -> Companion | None:
        """A companion from history. None: no measurement differs from the profile."""
        seen = [each for kept in self._history.values() for each in kept]
        try:
            companion = self._throughput.companion(request)
        except UsageError:  # there is no profile
            if not seen:
                raise
            name, batch = profile_and_batch(request)
            profile = seed_profile(seen, workload=name, batch=batch, types=self._types)
            return companion_of(request, profile, batch)
        if companion is None:
            return None
        mine = [each for each in seen if each.workload == companion.profile.workload]
        if not mine:
            return None
        if not companion.anchored:
            profile = seed_profile(
                seen, workload=companion.profile.workload, batch=companion.batch, types=self._types
            )
            return companion_of(
                request, _completed(profile, companion.profile, companion.batch), companion.batch
            )
        types = [name for name in companion.profile.types if any(each.type == name for each in mine)]
        seeded = seed_profile(mine, workload=companion.profile.workload, batch=companion.batch, types=types)
        speeds = dict(companion.profile.speeds)
        for name in types:
            factor = seeded.speed(name).seconds(companion.batch) / speeds[name].seconds(companion.batch)
            if abs(1 / factor - 1) > BIAS:
                speeds[name] = speeds[name].scaled(factor)
        if speeds == companion.profile.speeds:
            return None
        return replace(companion, profile=Profile(companion.profile.workload, speeds), _table={})


def _completed(known: Profile, assumed: Profile, batch: int) -> Profile:
    """The known speeds, and for other types the assumed ones at the scale of the first known type."""
    first = known.types[0]
    factor = known.speed(first).seconds(batch) / assumed.speed(first).seconds(batch)
    others = {
        name: speed.scaled(factor) for name, speed in assumed.speeds.items() if name not in known.speeds
    }
    return Profile(known.workload, {**others, **known.speeds})


def unhelpful(job: JobView) -> dict[str, int]:
    """Devices that the last resize added and that, as measured, have not made the job faster."""
    return {} if job.companion is None else job.companion.to_release(job.before, job.all_counts())

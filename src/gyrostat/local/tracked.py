"""What the controller knows of a job that has not ended, beside its record. Written by the loop's thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

from gyrostat.cluster.records import JobRecord
from gyrostat.core.devices import Devices
from gyrostat.core.request import JobRequest
from gyrostat.local.driver import Driver
from gyrostat.sched.port import Bound, Progressed

_REPORT_S = 5.0
"""How often the rate of a job is reported to the scheduler."""


def bound(request: JobRequest, devices: Devices, lent: Devices) -> tuple[Bound, ...]:
    """For a scheduler that does not know it yet: the job has these devices, of which those in `lent` are borrowed. Empty: it
    cannot keep them."""
    if not devices or not request.smallest <= len(devices) <= request.largest:
        return ()
    own = tuple(device for device in devices if device not in lent)
    return (Bound(request.id, own, tuple(device for device in devices if device in lent)),)


class RateMeter:
    """Steps per second between two reports. Time is an argument."""

    def __init__(self) -> None:
        self._since: tuple[float, int] | None = None
        """When the job was at which step, at the last report or first status."""

    def reset(self) -> None:
        """Its devices change."""
        self._since = None

    def update(self, step: int, now: float) -> float | None:
        """The rate, if it is time for a report."""
        if self._since is None or step < self._since[1]:
            self._since = now, step
            return None
        at, before = self._since
        if now - at < _REPORT_S or step <= before:
            return None
        self._since = now, step
        return (step - before) / (now - at)


@dataclass
class TrackedJob:
    """A job that has not ended."""

    driver: Driver | None = None
    """None: it is on no device, and should be on none."""
    request: JobRequest | None = None
    """As the scheduler knows it; None: it does not, because the job is paused, or waits before it is tried again."""
    devices: Devices = ()
    """Those that the scheduler has assigned to it."""
    reason: str | None = None
    """Why it is started on these."""
    verdict: str | None = None
    """Why it has to stop for good."""
    deaths: int = 0
    """How often its host was killed and it had not passed step `died_at`."""
    died_at: int = -1
    rate: RateMeter = field(default_factory=RateMeter)

    def retarget(self, within: float) -> None:
        """Pass `devices` on to the driver. `within`: it leaves all others in this many seconds."""
        if self.driver is not None:
            self.driver.retarget(self.devices, within=within)

    def progressed(self, step: int, now: float) -> tuple[Progressed, ...]:
        """For the scheduler, if it is time for a report and a policy uses the rate."""
        request = self.request
        if request is None or (request.work is None and request.workload is None):
            return ()
        rate = self.rate.update(step, now)
        return () if rate is None else (Progressed(request.id, float(step), rate),)

    def next_time(self, record: JobRecord, now: float) -> float | None:
        """Seconds until its time limit is over, or until it is tried again."""
        times = []
        if record.spec.time_limit is not None and record.holds_devices and self.verdict is None:
            times.append(record.spec.time_limit - record.ran_by(now))
        if self.request is None and record.not_before is not None:
            times.append(record.not_before - now)
        return min(times, default=None)

"""Which jobs' workers are on which devices now, beside what the scheduler has decided.

A decision takes effect when workers have moved, some time later. Until then a device is still occupied by the job that has
to leave it, and the next job waits. No job waits for one that may stay: two jobs that share a device (Gandiva) are both
entitled to it. There is no deadlock: a job waits only for devices that others are no longer entitled to, and every job
leaves before it waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gyrostat.core.devices import DeviceId, Devices


@dataclass(frozen=True)
class Holder:
    """A job that is on devices which another job should have."""

    job: str
    devices: Devices
    seconds: float
    """For how long it has had to leave them."""


class Occupancy:
    """May be used from any thread."""

    def __init__(
        self, on_change: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._changed = threading.Condition()
        self._on_change, self._clock = on_change, clock
        self._revoked: dict[str, dict[DeviceId, float]] = {}
        """Since when each job has had to leave which devices."""
        self._on: dict[DeviceId, set[str]] = {}
        self._entitled: dict[str, Devices] = {}

    def entitle(self, job: str, devices: Devices) -> None:
        """The scheduler has assigned exactly these to the job."""
        with self._changed:
            since, revoked = self._clock(), self._revoked.get(job, {})
            lost = {*revoked, *self._entitled.get(job, ())} - set(devices)
            self._revoked[job] = {device: revoked.get(device, since) for device in lost}
            if devices:
                self._entitled[job] = devices
            else:
                self._entitled.pop(job, None)
            self._changed.notify_all()
        self._on_change()

    def holders(self, job: str, devices: Iterable[DeviceId]) -> list[Holder]:
        """The jobs that have yet to leave some of these devices, by id."""
        with self._changed:
            held: dict[str, list[DeviceId]] = {}
            for device in devices:
                for other in self._on.get(device, ()):
                    if other != job and device not in self._entitled.get(other, ()):
                        held.setdefault(other, []).append(device)
            now = self._clock()
            return [
                Holder(other, tuple(on), now - min(self._revoked.get(other, {}).get(d, now) for d in on))
                for other, on in sorted(held.items())
            ]

    def acquire(self, job: str, devices: Iterable[DeviceId]) -> bool:
        """Occupy these as well, all at once. False: another job has yet to leave one of them."""
        with self._changed:
            wanted = list(devices)
            if self.holders(job, wanted):
                return False
            self.mark(job, wanted)
            return True

    def mark(self, job: str, devices: Iterable[DeviceId]) -> None:
        """It is on these, even if other jobs are too."""
        with self._changed:
            for device in devices:
                self._on.setdefault(device, set()).add(job)

    def release(self, job: str, keep: Iterable[DeviceId] = ()) -> None:
        """It occupies only `keep` from now on."""
        kept = set(keep)
        with self._changed:
            left = [jobs for device, jobs in self._on.items() if device not in kept and job in jobs]
            for jobs in left:
                jobs.discard(job)
            revoked = self._revoked.pop(job, {})
            if revoked := {device: since for device, since in revoked.items() if device in kept}:
                self._revoked[job] = revoked
            self._changed.notify_all()
        if left:
            self._on_change()

    def on(self, device: DeviceId) -> list[str]:
        """The jobs on this device."""
        with self._changed:
            return sorted(self._on.get(device, ()))

    def await_free(self, devices: Iterable[DeviceId], seconds: float) -> bool:
        """Whether these are free after at most `seconds`."""
        wanted = list(devices)
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(self._on.get(device) for device in wanted), timeout=seconds
            )

"""Which jobs' workers are on which devices now, beside what the scheduler has decided.

A decision takes effect when workers have moved, some time later. Until then a device is still occupied by the job that has
to leave it, and the next job waits. No job waits for one that may stay: two jobs that share a device (Gandiva) are both
entitled to it. There is no deadlock: a job waits only for devices that others are no longer entitled to, and every job
leaves before it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from gyrostat.core.devices import DeviceId, Devices


class Occupancy:
    """May be used from any thread."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._changed = threading.Condition()
        self._on_change = on_change
        self._on: dict[DeviceId, set[str]] = {}
        self._entitled: dict[str, Devices] = {}

    def entitle(self, job: str, devices: Devices) -> None:
        """The scheduler has assigned exactly these to the job."""
        with self._changed:
            if devices:
                self._entitled[job] = devices
            else:
                self._entitled.pop(job, None)
            self._changed.notify_all()
        self._on_change()

    def acquire(self, job: str, devices: Iterable[DeviceId]) -> bool:
        """Occupy these as well, all at once. False: another job has yet to leave one of them."""
        with self._changed:
            wanted = list(devices)
            for device in wanted:
                for other in self._on.get(device, ()):
                    if other != job and device not in self._entitled.get(other, ()):
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

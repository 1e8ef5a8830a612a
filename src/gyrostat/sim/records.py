"""The records of a simulation: one row per finished job in compact columns, and curves over time.

A curve has averages over at most `POINTS` equal intervals; when there are more, pairs of intervals are merged. So its memory
does not depend on the simulated time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from gyrostat.core.devices import Devices, Fleet
from gyrostat.sim.cluster import ActiveJob

POINTS = 1024


class Curve:
    """The average of a step function over time."""

    def __init__(self, began: float, value: float = 0.0) -> None:
        self._began = began
        self._width = 60.0
        self._sums = [0.0]
        self._at = began
        self._value = value
        self.integral = 0.0

    def set(self, now: float, value: float) -> None:
        self.advance(now)
        self._value = value

    def add(self, now: float, difference: float) -> None:
        self.advance(now)
        self._value += difference

    @property
    def value(self) -> float:
        return self._value

    def advance(self, now: float) -> None:
        """Extend the curve with the present value until now."""
        if now <= self._at:
            return
        value = self._value
        self.integral += value * (now - self._at)
        while True:
            index = len(self._sums) - 1
            end = self._began + self._width * (index + 1)
            if now < end:
                self._sums[index] += value * (now - self._at)
                self._at = now
                return
            self._sums[index] += value * (end - self._at)
            self._at = end
            self._sums.append(0.0)
            if len(self._sums) > POINTS:
                self._sums = [sum(self._sums[i : i + 2]) for i in range(0, len(self._sums), 2)]
                self._width *= 2

    def points(self) -> list[tuple[float, float]]:
        """The middle of each interval, and the average over it."""
        points = []
        for index, total in enumerate(self._sums):
            start = self._began + index * self._width
            length = min(self._width, self._at - start)
            if length > 0:
                points.append((start + length / 2, total / length))
        return points


class Records:
    """Records of one simulation. A `cluster.SimulationRecorder`."""

    def __init__(self, fleet: Fleet, began: float) -> None:
        self.fleet = fleet
        self.began = began
        self.ended = began
        self.ids: list[str] = []
        self.vcs: list[str] = []
        self._vc_numbers: dict[str, int] = {}
        self.vc = array("H")
        """By job, in order of completion, as all columns."""
        self.submitted, self.started, self.finished = array("d"), array("d"), array("d")
        self.waited, self.service = array("d"), array("d")
        self.devices, self.preemptions, self.migrations = array("L"), array("L"), array("L")
        self.busy = Curve(began)
        """Devices in use."""
        self.lent = Curve(began)
        """Borrowed devices in use."""
        self.broken = Curve(began)
        """Nodes of which a guaranteed job has a device, so that no other one can have the whole node."""
        self.waiting = Curve(began)
        """Jobs without devices."""
        self.preempted_at, self.preempted = array("d"), array("L")
        """Times of preemptions, and the number of devices of each."""
        self._users = [0] * len(fleet)
        self._guaranteed = [0] * len(fleet.nodes)
        self._borrowed: dict[str, Devices] = {}
        """By job: its borrowed devices."""

    def arrived(self, now: float) -> None:
        self.waiting.add(now, 1)

    def changed(self, now: float, job: ActiveJob, before: Devices, after: Devices, kind: str) -> None:
        id_ = job.job.request.id
        had = self._borrowed.pop(id_, ())
        has = job.borrowed if after else ()
        if has:
            self._borrowed[id_] = has
        self.busy.add(now, self._use(before, -1) + self._use(after, 1))
        if had or has:
            self.lent.add(now, len(has) - len(had))
        if kind == "preempt":
            self.preempted_at.append(now)
            self.preempted.append(len(before))
            self.waiting.add(now, 1)
        elif kind == "start":
            self.waiting.add(now, -1)
        broken = self._guarantee(before, had, -1) + self._guarantee(after, has, 1)
        if broken:
            self.broken.add(now, broken)

    def _guarantee(self, devices: Devices, borrowed: Devices, change: int) -> int:
        """The change in the number of nodes with devices of guaranteed jobs."""
        if len(borrowed) == len(devices):
            return 0
        node_of, guaranteed, difference = self.fleet.node_of, self._guaranteed, 0
        for device in devices:
            if borrowed and device in borrowed:
                continue
            node = node_of[device]
            held = guaranteed[node]
            guaranteed[node] = held + change
            difference += (held + change > 0) - (held > 0)
        return difference

    def _use(self, devices: Devices, change: int) -> int:
        """The change in the number of devices in use; two jobs may share one."""
        users, difference = self._users, 0
        for device in devices:
            before = users[device]
            users[device] = before + change
            difference += (before + change > 0) - (before > 0)
        return difference

    def finished_job(self, now: float, job: ActiveJob) -> None:
        request = job.job.request
        self.ids.append(request.id)
        tenant = job.job.tenant or request.vc
        number = self._vc_numbers.get(tenant)
        if number is None:
            number = self._vc_numbers[tenant] = len(self.vcs)
            self.vcs.append(tenant)
        self.vc.append(number)
        self.submitted.append(request.submitted)
        self.started.append(now if job.first_start is None else job.first_start)
        self.finished.append(now)
        self.waited.append(now - request.submitted - job.ran)
        self.service.append(job.service)
        self.devices.append(request.devices)
        self.preemptions.append(job.preemptions)
        self.migrations.append(job.migrations)
        self.ended = now

    @property
    def preempted_devices(self) -> int:
        return sum(self.preempted)

    def close(self, now: float) -> None:
        for curve in (self.busy, self.lent, self.broken, self.waiting):
            curve.advance(now)

    def of_vc(self, name: str) -> Sequence[int]:
        """Rows of one tenant's jobs."""
        number = self._vc_numbers.get(name)
        return [row for row, vc in enumerate(self.vc) if vc == number]

    def __len__(self) -> int:
        return len(self.vc)

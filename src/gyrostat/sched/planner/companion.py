"""EasyScale's companion module (§3.4): the throughput estimates of one job, as an immutable value.

A companion has three roles: the best split over given devices (role 1), the devices that would help most (role 2, the top-K
proposals for the inter-job scheduler), and after a measurement whether to release the devices added last (role 3). It
estimates from a profile. A measurement that differs by more than `BIAS` corrects the profile of the types in use, and the
measured value is used for that set of devices from then on. `measured` returns a new companion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile
from gyrostat.sched.planner.split import FewestDevices, Split, fastest

BIAS = 0.1
"""Measured and estimated throughput may differ by this much before the estimate is corrected."""

CountsKey = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class DeviceProposal:
    """Further devices of one type, and the throughput before and after in micro-batches per second."""

    type: str
    devices: int
    before: float
    after: float

    @property
    def speedup(self) -> float:
        return self.after / self.before if self.before else float("inf")

    @property
    def per_device(self) -> float:
        """Additional throughput per additional device."""
        return (self.after - self.before) / self.devices


@dataclass(frozen=True, kw_only=True)
class Companion:
    """The estimates of one job."""

    profile: Profile
    batch: int
    """Samples per virtual worker and step."""
    virtual_workers: int
    mixed: bool = True
    """Whether the job may use several device types at once (see `gyrostat scan`)."""
    anchored: bool = True
    """Whether the profile's speeds are absolute. If not, only their ratios are known, and the first measurement scales all."""
    facts: Mapping[CountsKey, float] = field(default_factory=dict)
    """Measured throughput by devices."""
    _table: dict[CountsKey, FewestDevices | None] = field(default_factory=dict, repr=False, compare=False)

    def best(self, devices: Mapping[str, int]) -> Split | None:
        """Role 1: the fastest split on at most these devices. None if there is none."""
        plan = self._plan(devices_key(devices))
        return None if plan is None else plan.split(self.virtual_workers)

    def _plan(self, key: CountsKey) -> FewestDevices | None:
        if key not in self._table:
            self._table[key] = self._fastest(key)
        return self._table[key]

    def _fastest(self, key: CountsKey) -> FewestDevices | None:
        known = {name: count for name, count in key if name in self.profile.speeds}
        choices = [known] if self.mixed else [{name: count} for name, count in known.items()]
        plans = [
            fastest(self.profile, batch=self.batch, virtual_workers=self.virtual_workers, devices=choice)
            for choice in choices
        ]
        return min((plan for plan in plans if plan is not None), key=lambda plan: plan.step, default=None)

    def throughput(self, devices: Mapping[str, int]) -> float:
        """Micro-batches per second on exactly these devices: measured if known, else estimated; 0 if it cannot run."""
        key = devices_key(devices)
        if key in self.facts:
            return self.facts[key]
        plan = self._plan(key)
        return 0.0 if plan is None else self.virtual_workers / plan.step

    def proposals(
        self, held: Mapping[str, int], free: Mapping[str, int], *, top: int
    ) -> list[DeviceProposal]:
        """Role 2: the `top` increments of one type that raise throughput most; of equal ones the smaller.

        There is no proposal for more devices than virtual workers, nor for devices that the best split would not use.
        """
        before = self.throughput(held)
        room = self.virtual_workers - sum(held.values())
        found = []
        for name, count in free.items():
            if name not in self.profile.speeds or (
                not self.mixed and any(t != name for t, n in held.items() if n)
            ):
                continue
            for more in range(1, min(count, room) + 1):
                wanted = devices_key({**held, name: held.get(name, 0) + more})
                plan = self._plan(wanted)
                if plan is None or plan.devices < sum(number for _, number in wanted):
                    continue
                after = self.facts.get(wanted) or self.virtual_workers / plan.step
                if after > before:
                    found.append(DeviceProposal(name, more, before, after))
        found.sort(key=lambda proposal: (-proposal.after, proposal.devices, proposal.type))
        return found[:top]

    def measured(self, devices: Mapping[str, int], throughput: float) -> Companion:
        """The companion after `throughput` was measured on `devices`."""
        if throughput <= 0:
            raise UsageError(f"a measured throughput is positive, got {throughput}")
        split = self.best(devices)
        facts = {**self.facts, devices_key(devices): throughput}
        if split is None or (self.anchored and abs(throughput / split.throughput - 1) <= BIAS):
            return replace(self, facts=facts)
        # The exchange is a constant of the profile, so the difference is in computing; at least a hundredth of it is left.
        computing = max(self.virtual_workers / throughput - split.exchange, split.overload / 100)
        factor = computing / split.overload
        speeds = {
            name: speed.scaled(factor) if name in split.devices or not self.anchored else speed
            for name, speed in self.profile.speeds.items()
        }
        profile = replace(self.profile, speeds=speeds)
        return replace(self, profile=profile, anchored=True, facts=facts, _table={})

    def to_release(self, before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
        """Role 3: the devices added since `before`, if measurements show that they did not help; else none."""
        then, since = self.facts.get(devices_key(before)), self.facts.get(devices_key(now))
        if then is None or since is None or since > then:
            return {}
        added = {name: count - before.get(name, 0) for name, count in now.items()}
        return {name: count for name, count in added.items() if count > 0}


def devices_key(devices: Mapping[str, int]) -> CountsKey:
    """A key for a set of devices, independent of the order of types."""
    return tuple(sorted((name, count) for name, count in devices.items() if count))

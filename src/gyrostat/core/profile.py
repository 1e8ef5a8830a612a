"""Profiles: the throughput of one workload on one device of each type, and the cost of exchanging gradients.

A profile is measured: samples per second by device type and micro-batch size, and the seconds per step that a job on several
devices spends on the exchange, by number of devices. Between measured points seconds are interpolated linearly; a micro-batch
above the largest measured one is assumed not to fit into the device's memory.

As JSON:

    {"workload": "resnet50",
     "throughput": {"v100": {"64": 900.0, "128": 1000.0}, "p100": {"64": 240.0}},
     "communication": {"v100": {"2": 0.02, "8": 0.05}, "p100": {"2": 0.02}}}

`communication` may be left out (0), be one number (the same for any two or more devices), or points per type. Other formats
are read by `sched.planner.tables`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from gyrostat.core.errors import UsageError

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Speed:
    """One device type: `throughput` in samples per second by micro-batch size, `exchange` in seconds per step by
    number of devices. Both ascending."""

    throughput: Points
    exchange: Points = ()

    def __post_init__(self) -> None:
        if not self.throughput:
            raise UsageError("a device type needs the throughput of at least one batch size, got none")
        for name, points, lowest in (
            ("batch size", self.throughput, 1),
            ("number of devices", self.exchange, 2),
        ):
            keys = [key for key, _ in points]
            if keys != sorted(set(keys)) or (keys and keys[0] < lowest):
                raise UsageError(f"a profile needs each {name} once, ascending from {lowest} on; got {keys}")
        if any(not (math.isfinite(rate) and rate > 0) for _, rate in self.throughput):
            raise UsageError(
                f"samples per second must be positive, got {dict(self.throughput)}; leave out batch sizes that do not fit"
            )
        if any(not (math.isfinite(seconds) and seconds >= 0) for _, seconds in self.exchange):
            raise UsageError(f"seconds for the exchange must be 0 or more, got {dict(self.exchange)}")

    @property
    def largest_batch(self) -> int:
        return self.throughput[-1][0]

    def seconds(self, batch: int) -> float:
        """Seconds for one micro-batch of `batch` samples; infinity if it does not fit."""
        if batch < 1:
            raise UsageError(f"a micro-batch has at least one sample, got {batch}")
        if batch > self.largest_batch:
            return math.inf
        return _interpolate(self._seconds, batch)

    @cached_property
    def _seconds(self) -> Points:
        return tuple((size, size / rate) for size, rate in self.throughput)

    def exchange_seconds(self, devices: int) -> float:
        """Seconds per step for a job on `devices` devices; never less than for fewer (measurements scatter), and 0 for one
        device."""
        if devices < 2 or not self.exchange:
            return 0.0
        known = self._known_exchange
        if devices not in known:
            known[devices] = _interpolate(self._rising_exchange, devices)
        return known[devices]

    @cached_property
    def _known_exchange(self) -> dict[int, float]:
        """A cache: planners ask for the same numbers again and again."""
        return {}

    @cached_property
    def _rising_exchange(self) -> Points:
        highest = accumulate((seconds for _, seconds in self.exchange), max)
        return tuple((devices, seconds) for (devices, _), seconds in zip(self.exchange, highest, strict=True))

    def scaled(self, factor: float) -> Speed:
        """The same with every micro-batch taking `factor` times as long."""
        return Speed(tuple((size, rate / factor) for size, rate in self.throughput), self.exchange)


@dataclass(frozen=True)
class Profile:
    """One workload on the device types that were measured."""

    workload: str
    speeds: Mapping[str, Speed]

    def __post_init__(self) -> None:
        if not self.speeds:
            raise UsageError(f"the profile of {self.workload} has no device type in it")

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(self.speeds)

    def speed(self, device_type: str) -> Speed:
        try:
            return self.speeds[device_type]
        except KeyError:
            raise UsageError(
                f"{self.workload} was not measured on {device_type!r}; its profile has {', '.join(self.speeds)}"
            ) from None

    def exchange_seconds(self, types: Iterable[str], devices: int) -> float:
        """Seconds per step for `devices` devices of these types together: the time of the slowest type."""
        return max((self.speed(name).exchange_seconds(devices) for name in types), default=0.0)

    @classmethod
    def from_json(cls, value: object) -> Profile:
        """From a parsed JSON document."""
        if not (isinstance(value, Mapping) and isinstance(value.get("throughput"), Mapping)):
            raise UsageError(
                'a profile is an object with "workload", "throughput" and perhaps "communication"'
            )
        unknown = set(value) - {"workload", "throughput", "communication"}
        if unknown:
            raise UsageError(f"a profile has no field {', '.join(sorted(map(str, unknown)))}")
        exchange = value.get("communication", 0.0)
        return cls(
            workload=str(value.get("workload", "job")),
            speeds={
                str(name): Speed(points(rates, f"throughput of {name}"), _exchange_of(exchange, str(name)))
                for name, rates in value["throughput"].items()
            },
        )

    def to_json(self) -> dict[str, object]:
        return {
            "workload": self.workload,
            "throughput": {name: {str(b): r for b, r in s.throughput} for name, s in self.speeds.items()},
            "communication": {
                name: {str(n): seconds for n, seconds in s.exchange} for name, s in self.speeds.items()
            },
        }


def points(value: object, what: str) -> Points:
    """`{"64": 900.0, …}`, ascending; `what` is for the error."""
    try:
        assert isinstance(value, Mapping)
        return tuple(sorted((int(key), float(number)) for key, number in value.items()))
    except (AssertionError, TypeError, ValueError):
        raise UsageError(f'{what}: expected an object such as {{"64": 900.0}}, got {value!r}') from None


def _exchange_of(value: object, device_type: str) -> Points:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ((2, float(value)),) if value else ()
    if isinstance(value, Mapping):
        return points(value.get(device_type, {}), f"communication of {device_type}")
    raise UsageError(f"communication is seconds per step, or points per device type; got {value!r}")


def _interpolate(known: Points, at: int) -> float:
    """Linear between known points; constant before the first and after the last."""
    index = bisect_left(known, (at, -math.inf))
    if index == 0 or index == len(known):
        return known[min(index, len(known) - 1)][1]
    (left, low), (right, high) = known[index - 1], known[index]
    return low + (high - low) * (at - left) / (right - left)

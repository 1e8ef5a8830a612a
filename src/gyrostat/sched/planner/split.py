"""The fastest split of N virtual workers over devices of several types.

Virtual workers on one device run in turn, all devices in parallel, and then gradients are exchanged. So a step takes the time
of the slowest device (EasyScale's overload factor, Eq. 1b) plus the exchange (VirtualFlow's communication term):

    step = max over used devices of (its virtual workers x its type's seconds per micro-batch) + exchange

`best_split` is exact. The slowest device determines the time before the exchange, so this time is k micro-batches of some
type. That time limits the virtual workers of each device. Of the sets of devices that hold all N, the smallest is best,
because an exchange among more devices never takes less time: devices with the most room first. That leaves N candidates per
type and set of types, of which only those near the optimum are evaluated, in ascending order of time. Devices that do not
help are left unused, also all but one type where mixing does not pay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from itertools import combinations, count
from math import ceil, isfinite
from typing import NamedTuple

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import Placement, apportion
from gyrostat.core.profile import Profile

_ROUNDING = 1e-9  # k micro-batches fit into the time of k micro-batches in spite of rounding


@dataclass(frozen=True)
class TypeShare:
    """The share of one device type: `counts[d]` virtual workers on its d-th device, each taking `seconds`."""

    type: str
    counts: tuple[int, ...]
    seconds: float

    @property
    def devices(self) -> int:
        return len(self.counts)

    @property
    def most(self) -> int:
        """A_i: the most virtual workers on one device of this type."""
        return max(self.counts)

    @property
    def speed(self) -> float:
        """C_i: micro-batches per second of one device."""
        return 1 / self.seconds


@dataclass(frozen=True)
class Split:
    """N virtual workers on devices of some types."""

    shares: tuple[TypeShare, ...]
    exchange: float
    """Seconds per step for exchanging gradients."""

    @cached_property
    def virtual_workers(self) -> int:
        return sum(sum(share.counts) for share in self.shares)

    @cached_property
    def devices(self) -> dict[str, int]:
        return {share.type: share.devices for share in self.shares}

    @cached_property
    def overload(self) -> float:
        """Eq. 1b: seconds of the slowest device."""
        return max(share.most * share.seconds for share in self.shares)

    @property
    def step(self) -> float:
        """Seconds per step."""
        return self.overload + self.exchange

    @property
    def room(self) -> int:
        """Eq. 1a's nEST: virtual workers that would fit without a longer step."""
        return sum(share.devices * share.most for share in self.shares)

    @property
    def waste(self) -> float:
        """Eq. 1c, micro-batches per second: idle time of devices, and room that no virtual worker uses.

        The paper's sum is over types; it balances Eq. 1d only if a type's idle speed counts once per device, as here.
        """
        idle = sum(share.devices * (share.speed - share.most / self.overload) for share in self.shares)
        return idle + (self.room - self.virtual_workers) / self.overload

    @property
    def throughput(self) -> float:
        """Micro-batches per second. Without an exchange this is Eq. 1d: the speed of the devices minus `waste`."""
        return self.virtual_workers / self.step

    @property
    def mixed(self) -> bool:
        return len(self.shares) > 1

    def placement(self) -> Placement:
        """The split as a placement: one worker per device, in the order of `shares`."""
        return Placement.from_counts([count for share in self.shares for count in share.counts])


def best_split(
    profile: Profile, *, batch: int, virtual_workers: int, devices: Mapping[str, int]
) -> Split | None:
    """The fastest on at most these devices, among equally fast ones the one with the fewest devices. None if none fits."""
    plan = fastest(profile, batch=batch, virtual_workers=virtual_workers, devices=devices)
    return None if plan is None else plan.split(virtual_workers)


def fastest(
    profile: Profile, *, batch: int, virtual_workers: int, devices: Mapping[str, int]
) -> FewestDevices | None:
    """The same without the assignment of virtual workers: only the step time and the number of devices."""
    if virtual_workers < 1:
        raise UsageError(f"a job has at least one virtual worker, got {virtual_workers}")
    if any(number < 0 for number in devices.values()):
        raise UsageError(f"numbers of devices must be 0 or more, got {dict(devices)}")
    seconds = {name: profile.speed(name).seconds(batch) for name, number in devices.items() if number > 0}
    usable = sorted(_Kind(each, name, devices[name]) for name, each in seconds.items() if isfinite(each))
    best: FewestDevices | None = None
    for choice in sorted(_choices(usable, virtual_workers, profile)):
        if best is not None and choice.bound > best.step * (1 + _ROUNDING):
            break
        best = _better(best, choice, virtual_workers, profile)
    return best


class _Kind(NamedTuple):
    """Devices of one type that may be used."""

    seconds: float
    name: str
    devices: int


class FewestDevices(NamedTuple):
    """The time of a step, and the fewest devices of each kind for it."""

    step: float
    devices: int
    used: list[int]
    kinds: tuple[_Kind, ...]
    time: float
    exchange: float

    def split(self, virtual_workers: int) -> Split:
        """Assign virtual workers to devices in proportion to their room."""
        spare = [
            _room(kind.seconds, self.time) - 1
            for kind, number in zip(self.kinds, self.used, strict=True)
            for _ in range(number)
        ]
        counts = apportion(virtual_workers, spare) if any(spare) else [1] * len(spare)
        shares, start = [], 0
        for kind, number in zip(self.kinds, self.used, strict=True):
            if number:
                shares.append(TypeShare(kind.name, tuple(counts[start : start + number]), kind.seconds))
            start += number
        return Split(tuple(shares), self.exchange)


def _room(seconds: float, time: float) -> int:
    """Virtual workers that one device runs within `time`."""
    return int(time / seconds + _ROUNDING)


class _Choice(NamedTuple):
    """A set of types, fastest first, and a lower bound of the step time: all devices busy, one of each exchanging."""

    bound: float
    types: int
    shortest: float
    exchange: float
    kinds: tuple[_Kind, ...]


def _choices(usable: Sequence[_Kind], virtual_workers: int, profile: Profile) -> Iterator[_Choice]:
    for types in range(1, len(usable) + 1):
        for kinds in combinations(usable, types):
            shortest = virtual_workers / sum(kind.devices / kind.seconds for kind in kinds)
            exchange = profile.exchange_seconds([kind.name for kind in kinds], types)
            yield _Choice(shortest + exchange, types, shortest, exchange, kinds)


def _better(
    best: FewestDevices | None, choice: _Choice, virtual_workers: int, profile: Profile
) -> FewestDevices | None:
    """`best`, or a faster plan over these kinds; of equally fast ones the one with fewer devices, then fewer types."""
    kinds = choice.kinds
    types = [kind.name for kind in kinds]
    slowest = virtual_workers * kinds[-1].seconds
    for time in _step_times(kinds, choice.shortest):
        if best is not None and time + choice.exchange > best.step * (1 + _ROUNDING):
            break
        used = _fewest(kinds, virtual_workers, time)
        if used is None:
            continue
        devices = sum(used)
        exchange = profile.exchange_seconds(types, devices)
        step = time + exchange
        if (
            best is None
            or step < best.step * (1 - _ROUNDING)
            or (
                step <= best.step * (1 + _ROUNDING)
                and (devices, len(kinds)) < (best.devices, len(best.kinds))
            )
        ):
            best = FewestDevices(step, devices, used, kinds, time, exchange)
        if devices <= 1 or time >= slowest:
            break
    return best


def _step_times(kinds: Sequence[_Kind], shortest: float) -> Iterator[float]:
    """Candidate times before the exchange, ascending, from the time in which all devices are always busy."""
    if len(kinds) == 1:
        return _multiples(kinds[0].seconds, shortest)
    return merge(*(_multiples(kind.seconds, shortest) for kind in kinds))


def _multiples(seconds: float, shortest: float) -> Iterator[float]:
    return (number * seconds for number in count(max(1, ceil(shortest / seconds - _ROUNDING))))


def _fewest(kinds: Sequence[_Kind], virtual_workers: int, time: float) -> list[int] | None:
    """The fewest devices of each kind: those with the most room first. None: all of them are too few."""
    used, left = [], virtual_workers
    for seconds, _, devices in kinds:
        room = _room(seconds, time)
        number = min(devices, -(-left // room)) if room and left > 0 else 0
        used.append(number)
        left -= number * room
    return None if left > 0 else used

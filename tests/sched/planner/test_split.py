from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile, Speed
from gyrostat.sched.planner.split import Split, TypeShare, best_split


def profile(
    seconds: Mapping[str, float], exchange: Mapping[str, Mapping[int, float]] | None = None
) -> Profile:
    """Micro-batches of one sample."""
    points = {name: tuple(sorted((exchange or {}).get(name, {}).items())) for name in seconds}
    return Profile("w", {name: Speed(((1, 1 / each),), points[name]) for name, each in seconds.items()})


def split(known: Profile, virtual_workers: int, devices: Mapping[str, int]) -> Split:
    found = best_split(known, batch=1, virtual_workers=virtual_workers, devices=devices)
    assert found is not None
    return found


def brute_force(known: Profile, virtual_workers: int, devices: Mapping[str, int]) -> float:
    """The shortest step over every way to give every device every number of virtual workers, zero included."""
    types = [name for name, count in devices.items() for _ in range(count)]
    best = math.inf
    for counts in itertools.product(range(virtual_workers + 1), repeat=len(types)):
        if sum(counts) == virtual_workers:
            used = [(name, count) for name, count in zip(types, counts, strict=True) if count]
            compute = max(count * known.speed(name).seconds(1) for name, count in used)
            best = min(best, compute + known.exchange_seconds({name for name, _ in used}, len(used)))
    return best


durations = st.sampled_from([0.1, 0.15, 0.2, 0.25, 1 / 3, 0.7, 1.0, 2.5])
exchanges = st.dictionaries(st.integers(2, 6), st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0]), max_size=3)


@settings(deadline=None)
@given(
    seconds=st.dictionaries(st.sampled_from(["a", "b", "c"]), durations, min_size=1),
    exchange=st.dictionaries(st.sampled_from(["a", "b", "c"]), exchanges),
    counts=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
    virtual_workers=st.integers(1, 6),
)
def test_it_is_as_fast_as_brute_force_and_keeps_every_promise(
    seconds: dict[str, float],
    exchange: dict[str, dict[int, float]],
    counts: tuple[int, int, int],
    virtual_workers: int,
) -> None:
    known = profile(seconds, exchange)
    devices = {name: count for name, count in zip("abc", counts, strict=True) if name in seconds}
    found = best_split(known, batch=1, virtual_workers=virtual_workers, devices=devices)
    if found is None:
        assert sum(devices.values()) == 0
        return
    assert found.step == pytest.approx(brute_force(known, virtual_workers, devices))
    assert found.virtual_workers == virtual_workers
    assert all(found.devices[name] <= devices[name] for name in found.devices)
    assert found.exchange == known.exchange_seconds(found.devices, sum(found.devices.values()))
    assert found.placement().virtual_workers == virtual_workers
    # Eq. 1d: what the devices could do, less the waste, is what they do between exchanges.
    capability = sum(share.devices * share.speed for share in found.shares)
    assert capability - found.waste == pytest.approx(virtual_workers / found.overload)


@settings(deadline=None)
@given(
    fast=durations,
    slow=durations,
    counts=st.tuples(st.integers(0, 16), st.integers(0, 16)),
    virtual_workers=st.integers(1, 32),
    per_device=st.sampled_from([0.0, 0.001, 0.02, 0.2]),
)
def test_it_is_as_fast_as_every_choice_of_devices_and_loads_of_two_types(
    fast: float, slow: float, counts: tuple[int, int], virtual_workers: int, per_device: float
) -> None:
    points = {n: per_device * n for n in range(2, 33)}
    known = profile({"a": fast, "b": slow}, {"a": points, "b": points})
    best = math.inf
    for used_a, used_b in itertools.product(range(counts[0] + 1), range(counts[1] + 1)):
        exchange = known.exchange_seconds("ab", used_a + used_b)
        for load_a in range(virtual_workers + 1) if used_a else [0]:
            left = max(0, virtual_workers - used_a * load_a)
            if used_b or left == 0:
                load_b = -(-left // used_b) if used_b else 0
                best = min(best, max(load_a * fast, load_b * slow) + exchange)
    found = best_split(
        known, batch=1, virtual_workers=virtual_workers, devices={"a": counts[0], "b": counts[1]}
    )
    assert (math.inf if found is None else found.step) == pytest.approx(best)


def test_a_case_worked_by_hand() -> None:
    """One device of 0.25 s and two of 1 s, 6 virtual workers: 4 + 1 + 1 take 1 s."""
    found = split(profile({"v100": 0.25, "p100": 1.0}), 6, {"v100": 1, "p100": 2})
    assert found.shares == (TypeShare("v100", (4,), 0.25), TypeShare("p100", (1, 1), 1.0))
    assert (found.overload, found.room, found.waste, found.throughput) == (1.0, 6, 0.0, 6.0)


def test_waste_counts_idle_devices_and_room_that_nobody_fills() -> None:
    """7 on devices of 0.25 s and 0.3 s: 4 + 3 take 1.0 s; the second idles 0.1 s of it, a third of a micro-batch."""
    found = split(profile({"a": 0.25, "b": 0.3}), 7, {"a": 1, "b": 1})
    assert found.shares == (TypeShare("a", (4,), 0.25), TypeShare("b", (3,), 0.3))
    assert found.waste == pytest.approx(1 / 3)
    assert found.throughput == pytest.approx(7.0)


def test_devices_that_do_not_help_are_left_unused() -> None:
    assert split(profile({"a": 1.0}), 4, {"a": 3}).devices == {"a": 2}


def test_it_falls_back_to_one_type_when_the_exchange_eats_the_gain() -> None:
    exchange = {"fast": {2: 0.01}, "slow": {2: 0.9}}
    known = profile({"fast": 0.5, "slow": 1.0}, exchange)
    found = split(known, 6, {"fast": 2, "slow": 2})
    assert (found.devices, found.mixed, found.step) == ({"fast": 2}, False, 1.51)
    without = split(profile({"fast": 0.5, "slow": 1.0}), 6, {"fast": 2, "slow": 2})
    assert (without.devices, without.step) == ({"fast": 2, "slow": 2}, 1.0)


def test_a_micro_batch_that_does_not_fit_excludes_a_type() -> None:
    known = Profile("w", {"big": Speed(((64, 64.0),)), "small": Speed(((8, 800.0),))})
    found = best_split(known, batch=64, virtual_workers=2, devices={"big": 1, "small": 4})
    assert found is not None
    assert found.devices == {"big": 1}
    assert best_split(known, batch=65, virtual_workers=2, devices={"big": 1, "small": 4}) is None


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one virtual worker, got 0"):
        split(profile({"a": 1.0}), 0, {"a": 1})
    with pytest.raises(UsageError, match="0 or more"):
        split(profile({"a": 1.0}), 1, {"a": -1})

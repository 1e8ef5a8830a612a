from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile, Speed
from gyrostat.sched.planner import definition
from gyrostat.sched.planner.definition import BatchShare, Definition, define


def brute_force(known: Profile, global_batch: int, devices: Mapping[str, int], most: int) -> float:
    """Every number of devices, micro-batches and measured size of every type."""
    choices = []
    for name, count in devices.items():
        speed = known.speed(name)
        choices.append(
            [(name, 0, 0, 0.0)]
            + [
                (name, used, v * batch, v * batch / rate)
                for used in range(1, count + 1)
                for batch, rate in speed.throughput
                for v in range(1, most + 1)
            ]
        )
    best = math.inf
    for chosen in itertools.product(*choices):
        if sum(used * samples for _, used, samples, _ in chosen) == global_batch:
            types = {name for name, used, _, _ in chosen if used}
            time = max(time for _, _, _, time in chosen)
            best = min(best, time + known.exchange_seconds(types, sum(used for _, used, _, _ in chosen)))
    return best


curves = st.dictionaries(
    st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1.0, 2.0, 3.5, 7.0, 20.0]), min_size=1
)
problems = st.tuples(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.tuples(curves, st.integers(0, 3)), min_size=1),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(1, 40),
)


def solved(
    problem: tuple[dict[str, tuple[dict[int, float], int]], float, int],
) -> tuple[Definition | None, float]:
    kinds, exchange, global_batch = problem
    points = ((2, exchange), (4, 2 * exchange)) if exchange else ()
    known = Profile(
        "w", {name: Speed(tuple(sorted(curve.items())), points) for name, (curve, _) in kinds.items()}
    )
    devices = {name: count for name, (_, count) in kinds.items()}
    found = define(known, global_batch=global_batch, devices=devices, most_per_device=4)
    if found is not None:
        assert found.samples == sum(found.batch_sizes) == global_batch
        assert all(part.devices <= devices[part.type] for part in found.parts)
        assert all(part.virtual_workers <= 4 for part in found.parts)
    return found, brute_force(known, global_batch, devices, 4)


@settings(deadline=None)
@given(problems)
def test_small_problems_are_solved_exactly(
    problem: tuple[dict[str, tuple[dict[int, float], int]], float, int],
) -> None:
    found, best = solved(problem)
    assert (math.inf if found is None else found.step) == pytest.approx(best)


@settings(deadline=None)
@given(problems)
def test_large_problems_are_solved_within_one_percent(
    problem: tuple[dict[str, tuple[dict[int, float], int]], float, int],
) -> None:
    """The way that large problems are searched, on problems that brute force can solve."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(definition, "EXACT_CHOICES", 0)
        found, best = solved(problem)
    if found is None:
        assert best == math.inf
    else:
        assert (
            best * (1 - 1e-9) <= found.step <= best * (1 + definition.TOLERANCE) / (1 - definition.TOLERANCE)
        )


FOUR_TIMES = Profile(  # the ratio of VirtualFlow's Figure 7
    "resnet50", {"v100": Speed(((128, 800.0), (256, 800.0))), "p100": Speed(((128, 200.0), (256, 200.0)))}
)


def test_virtualflows_h3_eight_slow_devices_are_worth_mixing() -> None:
    """2 V100 and 8 P100, batch 8192: half of it each, as in the paper's Table 4 (2048 and 512 per device)."""
    found = define(FOUR_TIMES, global_batch=8192, devices={"v100": 2, "p100": 8})
    assert found is not None
    assert {part.type: (part.devices, part.samples) for part in found.parts} == {
        "v100": (2, 2048),
        "p100": (8, 512),
    }
    assert found.step == pytest.approx(2.56)
    assert len(found.batch_sizes) == sum(part.devices * part.virtual_workers for part in found.parts)


def test_virtualflows_h1_two_slow_devices_are_not_once_the_exchange_counts() -> None:
    """2 + 2: mixed 3328 + 768 take 4.16 s; V100 alone 5.12 s. An exchange of 1.5 s for mixing turns that round."""
    devices = {"v100": 2, "p100": 2}
    mixed = define(FOUR_TIMES, global_batch=8192, devices=devices)
    assert mixed is not None
    assert len(mixed.parts) == 2
    slow = Speed(FOUR_TIMES.speeds["p100"].throughput, ((2, 1.5),))
    found = define(Profile("w", {**FOUR_TIMES.speeds, "p100": slow}), global_batch=8192, devices=devices)
    assert found is not None
    assert found.parts == (BatchShare("v100", 2, 16, 256, 0.32),)


def test_what_cannot_be_shared_out_and_nonsense() -> None:
    assert define(FOUR_TIMES, global_batch=100, devices={"v100": 1}) is None
    assert define(FOUR_TIMES, global_batch=128, devices={}) is None
    with pytest.raises(UsageError, match="at least 1"):
        define(FOUR_TIMES, global_batch=0, devices={"v100": 1})

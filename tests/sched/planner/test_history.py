from __future__ import annotations

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.sched.planner.history import Observation, seed_profile

HISTORY = [
    Observation("bert", "v100", 8, 100.0),
    Observation("bert", "v100", 8, 110.0),
    Observation("bert", "v100", 8, 500.0),
    Observation("bert", "p100", 8, 55.0),
    Observation("resnet", "v100", 64, 400.0),
    Observation("resnet", "k80", 64, 50.0),
]


def rates(workload: str, batch: int, *types: str) -> dict[str, float]:
    found = seed_profile(HISTORY, workload=workload, batch=batch, types=types)
    assert {size for speed in found.speeds.values() for size, _ in speed.throughput} == {batch}
    return {name: speed.throughput[0][1] for name, speed in found.speeds.items()}


def test_the_median_of_what_the_workload_did_before() -> None:
    assert rates("bert", 8, "v100", "p100") == {"v100": 110.0, "p100": 55.0}


def test_another_batch_size_takes_the_rate_of_the_nearest() -> None:
    assert rates("resnet", 32, "v100") == {"v100": pytest.approx(400.0)}


def test_a_type_that_the_workload_never_saw_is_judged_by_the_others() -> None:
    """v100 took 1/2 (bert) and 1/8 (resnet) of the slowest type's time: 5/16 in the median; k80 all of it."""
    assert rates("bert", 8, "v100", "k80")["k80"] == pytest.approx(110.0 * (5 / 16))


def test_an_unknown_workload_gets_ratios() -> None:
    found = rates("gpt", 1, "v100", "k80")
    assert found["v100"] / found["k80"] == pytest.approx(16 / 5)


def test_nothing_known_is_an_error() -> None:
    with pytest.raises(UsageError, match="gpt was measured on none of t4"):
        rates("gpt", 1, "t4")

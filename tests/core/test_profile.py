from __future__ import annotations

import json
import math

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile, Speed

SPEED = Speed(throughput=((8, 80.0), (32, 160.0)), exchange=((2, 0.01), (4, 0.03), (8, 0.02)))


def test_seconds_at_and_between_measured_batches() -> None:
    assert SPEED.seconds(8) == 0.1
    assert SPEED.seconds(32) == 0.2
    assert SPEED.seconds(20) == pytest.approx(0.15)


def test_below_the_smallest_batch_nothing_is_gained_and_above_the_largest_it_does_not_fit() -> None:
    assert SPEED.seconds(1) == 0.1
    assert math.isinf(SPEED.seconds(33))


def test_an_exchange_among_more_devices_never_takes_less() -> None:
    assert [SPEED.exchange_seconds(n) for n in (1, 2, 3, 4, 8, 100)] == [
        0.0,
        0.01,
        pytest.approx(0.02),
        0.03,
        0.03,
        0.03,
    ]


def test_devices_of_several_types_exchange_as_slowly_as_the_slowest() -> None:
    profile = Profile("w", {"a": SPEED, "b": Speed(((8, 8.0),))})
    assert profile.exchange_seconds(["b"], 4) == 0.0
    assert profile.exchange_seconds(["a", "b"], 4) == 0.03


def test_a_profile_survives_json() -> None:
    profile = Profile("w", {"a": SPEED, "b": Speed(((8, 8.0),))})
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_communication_may_be_one_number() -> None:
    profile = Profile.from_json({"throughput": {"a": {"8": 80}}, "communication": 0.5})
    assert [profile.exchange_seconds(["a"], n) for n in (1, 2, 9)] == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "a profile is an object"),
        ({"throughput": {}}, "no device type"),
        ({"throughput": {"a": {}}}, "at least one batch size"),
        ({"throughput": {"a": {"8": 0.0}}}, "must be positive"),
        ({"throughput": {"a": {"0": 1.0}}}, "ascending from 1 on"),
        ({"throughput": {"a": {"many": 1.0}}}, "expected an object such as"),
        ({"throughput": {"a": {"8": 1.0}}, "communication": "slow"}, "seconds per step"),
        ({"throughput": {"a": {"8": 1.0}}, "communication": {"a": {"1": 0.1}}}, "ascending from 2 on"),
        ({"throughput": {"a": {"8": 1.0}}, "comunication": 1}, "no field comunication"),
    ],
)
def test_what_is_no_profile_is_refused(document: object, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Profile.from_json(document)


def test_an_unmeasured_type_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="w was not measured on 't4'; its profile has a"):
        Profile("w", {"a": SPEED}).speed("t4")

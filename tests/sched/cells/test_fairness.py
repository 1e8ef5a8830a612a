"""Weighted max-min fairness in whole devices."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.sched.cells.fairness import fair_shares


@pytest.mark.parametrize(
    ("capacity", "demands", "weights", "shares"),
    [
        (10, {"a": 2, "b": 9, "c": 9}, {}, {"a": 2, "b": 4, "c": 4}),
        (12, {"a": 20, "b": 20}, {"a": 2, "b": 1}, {"a": 8, "b": 4}),
        (12, {"a": 3, "b": 20}, {"a": 2, "b": 1}, {"a": 3, "b": 9}),
        (7, {"a": 5, "b": 5}, {}, {"a": 4, "b": 3}),
        (3, {"a": 5, "b": 5, "c": 5, "d": 5}, {}, {"a": 1, "b": 1, "c": 1, "d": 0}),
        (100, {"a": 5, "b": 0}, {}, {"a": 5, "b": 0}),
        (0, {"a": 5}, {}, {"a": 0}),
        (5, {}, {}, {}),
    ],
)
def test_hand_worked(
    capacity: int, demands: dict[str, int], weights: dict[str, float], shares: dict[str, int]
) -> None:
    assert fair_shares(capacity, demands, weights) == shares


names = st.sampled_from("abcdef")


@given(
    st.integers(0, 60),
    st.dictionaries(names, st.integers(0, 40)),
    st.dictionaries(names, st.sampled_from([0.5, 1, 2, 3, 0.1])),
)
def test_no_tenant_could_have_more_without_taking_from_one_that_has_less(
    capacity: int, demands: dict[str, int], weights: dict[str, float]
) -> None:
    shares = fair_shares(capacity, demands, weights)
    assert sum(shares.values()) == min(capacity, sum(demands.values()))
    weight = {name: Fraction(weights.get(name, 1)) for name in demands}
    for name, share in shares.items():
        assert 0 <= share <= demands[name]
        if share < demands[name]:
            # One more for this tenant would put it above everyone who has something to give.
            for other, has in shares.items():
                assert (
                    other == name
                    or has == 0
                    or Fraction(share + 1) / weight[name] >= Fraction(has) / weight[other]
                )

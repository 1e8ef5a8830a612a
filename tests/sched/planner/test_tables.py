from __future__ import annotations

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile, Speed
from gyrostat.sched.planner.tables import profiles_of

GAVEL = {
    "k80": {
        "LM (batch size 5)": {"1": 25.0, "2": 40.0},
        "LM (batch size 10)": {"1": 20.0, "2": 0.0},
        "A3C": {"1": 3.0},
    },
    "v100": {"LM (batch size 5)": {"1": 50.0, "4": 100.0}, "LM (batch size 20)": {"1": 0.0}},
}


def test_gavels_form() -> None:
    """Two k80 take 2/40 s for a micro-batch each, one takes 1/25: the exchange is 10 ms. 0.0 means that it does not fit."""
    found = profiles_of(GAVEL)
    assert set(found) == {"LM", "A3C"}
    assert found["LM"].speeds["k80"].throughput == ((5, 125.0), (10, 200.0))
    assert found["LM"].speeds["k80"].exchange == ((2, 2 / 40.0 - 1 / 25.0),)
    assert found["LM"].speeds["v100"] == Speed(((5, 250.0),), ((4, 4 / 100.0 - 1 / 50.0),))
    assert found["A3C"] == Profile("A3C", {"k80": Speed(((1, 3.0),))})


def test_virtualflows_form() -> None:
    found = profiles_of({"v100": {"bert": {"8": 91.0, "16": 110.0}}, "p100": {"bert": {"8": 57.0}}})
    assert found == {
        "bert": Profile("bert", {"v100": Speed(((8, 91.0), (16, 110.0))), "p100": Speed(((8, 57.0),))})
    }


def test_our_own_form_and_lists_of_it() -> None:
    profile = Profile("w", {"a": Speed(((8, 80.0),), ((2, 0.1),))})
    assert profiles_of(profile.to_json()) == {"w": profile}
    assert profiles_of([profile.to_json()]) == {"w": profile}


@pytest.mark.parametrize("document", [{}, 3, {"v100": 4}, {"v100": {"bert": [1]}}])
def test_anything_else_is_refused(document: object) -> None:
    with pytest.raises(UsageError):
        profiles_of(document)

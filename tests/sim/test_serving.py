from __future__ import annotations

from itertools import islice

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.sched.port import Withdrawn
from gyrostat.sim.serving import Diurnal


def needed(load: Diurnal, number: int) -> list[int]:
    changes = list(islice(load.changes(), number))
    assert [at for at, _ in changes] == [load.step * k for k in range(number)]
    assert all(isinstance(change, Withdrawn) and change.type == load.type for _, change in changes)
    return [change.devices for _, change in changes if isinstance(change, Withdrawn)]


def test_trough_at_midnight_peak_at_noon() -> None:
    load = Diurnal(type="v100", trough=10, peak=50, period=24.0, step=6.0)
    assert needed(load, 5) == [10, 30, 50, 30, 10]


def test_noise_stays_between_trough_and_peak_and_repeats_with_its_seed() -> None:
    load = Diurnal(type="v100", trough=10, peak=50, noise=0.5, seed=3)
    drawn = needed(load, 300)
    assert (min(drawn), max(drawn)) == (10, 50)
    assert drawn == needed(load, 300)
    assert drawn != needed(Diurnal(type="v100", trough=10, peak=50, noise=0.5, seed=4), 300)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="from trough up to peak, got 5 and 4"):
        Diurnal(type="v100", trough=5, peak=4)
    with pytest.raises(UsageError, match="above 0"):
        Diurnal(type="v100", trough=1, peak=4, step=0.0)

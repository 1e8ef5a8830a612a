"""Which deaths speak for a poison batch, and which do not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.evidence import RunningMicroBatch
from gyrostat.job.diagnostics.poison import Death, poison


def batch(*samples: int, step: int = 0, rank: int = 0) -> RunningMicroBatch:
    return RunningMicroBatch(step=step, rank=rank, number=0, samples=samples, size=len(samples))


def death(running: RunningMicroBatch | None, *, alone: bool = True, member: int = 0) -> Death:
    return Death(member=member, how="was killed by SIGSEGV", running=running, alone=alone)


def test_the_third_death_counts_wherever_it_is() -> None:
    deaths = [death(batch(7, 8, step=step, rank=1), member=step) for step in range(3)]
    assert poison(deaths[:2]) is None
    assert poison(deaths) == batch(7, 8, step=2, rank=1)
    assert poison(deaths, limit=4) is None
    assert poison(deaths[:1], limit=1) == batch(7, 8, step=0, rank=1)
    assert poison(deaths, limit=0) is None


def test_other_deaths_in_between_do_not_help_it() -> None:
    bad, good = batch(1, 2), batch(3, 4)
    assert poison([death(bad), death(good), death(bad), death(None), death(bad)]) == bad
    assert poison([death(bad), death(good), death(good), death(bad), death(None)]) is None


def test_missed_heartbeats_and_lost_nodes_do_not_count() -> None:
    bad = batch(1)
    assert poison([death(bad), death(bad), death(bad, alone=False)]) is None


def test_nothing_was_running() -> None:
    assert poison([death(None)] * 5) is None


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_it_is_the_first_to_reach_the_limit(samples: list[int], limit: int) -> None:
    found = poison([death(batch(sample)) for sample in samples], limit)
    reached = [samples[: end + 1].count(sample) == limit for end, sample in enumerate(samples)]
    if any(reached):
        assert found == batch(samples[reached.index(True)])
    else:
        assert found is None

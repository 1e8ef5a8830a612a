from __future__ import annotations

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.profile import Profile, Speed
from gyrostat.sched.planner.companion import Companion, DeviceProposal


def companion(virtual_workers: int = 4, *, mixed: bool = True, exchange: float = 0.0) -> Companion:
    points = ((2, exchange),) if exchange else ()
    speeds = {"v100": Speed(((1, 4.0),), points), "p100": Speed(((1, 1.0),), points)}
    return Companion(profile=Profile("w", speeds), batch=1, virtual_workers=virtual_workers, mixed=mixed)


def test_the_best_split_on_what_it_has() -> None:
    best = companion(5).best({"v100": 1, "p100": 1})
    assert best is not None
    assert [share.counts for share in best.shares] == [(4,), (1,)]
    assert companion().best({}) is None


def test_top_proposals_by_throughput_without_devices_that_would_idle() -> None:
    """4 virtual workers: three devices are no faster than two, so nobody asks for three."""
    assert companion().proposals({"v100": 1}, {"v100": 3}, top=5) == [
        DeviceProposal("v100", 3, 4.0, 16.0),
        DeviceProposal("v100", 1, 4.0, 8.0),
    ]
    assert companion().proposals({"v100": 1}, {"v100": 3}, top=1) == [DeviceProposal("v100", 3, 4.0, 16.0)]


def test_speedup_and_gain_per_device() -> None:
    proposal = DeviceProposal("v100", 3, 4.0, 16.0)
    assert (proposal.speedup, proposal.per_device) == (4.0, 4.0)
    assert DeviceProposal("v100", 1, 0.0, 4.0).speedup == float("inf")


def test_a_waiting_job_proposes_from_nothing_and_of_each_type() -> None:
    found = companion(1).proposals({}, {"v100": 2, "p100": 2}, top=5)
    assert found == [DeviceProposal("v100", 1, 0.0, 4.0), DeviceProposal("p100", 1, 0.0, 1.0)]


def test_a_job_that_must_stay_on_one_type_does() -> None:
    one = companion(5, mixed=False)
    assert one.proposals({"v100": 1}, {"p100": 4}, top=5) == []
    best = one.best({"v100": 1, "p100": 1})
    assert best is not None
    assert best.devices == {"v100": 1}
    assert companion(5).proposals({"v100": 1}, {"p100": 1}, top=5) == [DeviceProposal("p100", 1, 4.0, 5.0)]


def test_a_small_bias_is_recorded_and_a_large_one_corrects_the_profile() -> None:
    close = companion().measured({"v100": 1}, 3.8)
    assert close.profile == companion().profile
    assert close.throughput({"v100": 1}) == 3.8
    off = companion().measured({"v100": 1}, 2.0)
    assert off.profile.speed("v100").seconds(1) == pytest.approx(0.5)
    assert off.profile.speed("p100").seconds(1) == 1.0
    assert off.throughput({"v100": 2}) == pytest.approx(4.0)


def test_only_computing_is_blamed_for_a_bias_never_the_exchange() -> None:
    """2 on 2 devices: 0.25 s + 0.2 s. Measured 1 s a step: a micro-batch takes 0.8 s."""
    corrected = companion(2, exchange=0.2).measured({"v100": 2}, 2.0)
    assert corrected.profile.speed("v100").seconds(1) == pytest.approx(0.8)


def test_devices_that_made_it_slower_go_back_and_are_not_asked_for_again() -> None:
    before, now = {"v100": 1}, {"v100": 2}
    job = companion(2).measured(before, 4.0)
    assert job.to_release(before, now) == {}  # nothing was measured yet
    job = job.measured(now, 3.9)
    assert job.to_release(before, now) == {"v100": 1}
    assert job.proposals(before, {"v100": 1}, top=3) == []
    assert companion(2).measured(before, 4.0).measured(now, 7.0).to_release(before, now) == {}


def test_a_throughput_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="positive, got 0"):
        companion().measured({"v100": 1}, 0.0)

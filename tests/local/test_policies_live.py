"""Every policy of this package on real time: real daemon, real workers, a clock that is never exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.sched.policies.registry import OURS
from tests.conftest import Launch
from tests.local.clusters import finished, fixed, hurry, running, spec, until, write_script

SETTINGS = {"gavel": "gavel:round=1,reset=1", "optimus": "optimus:interval=1"}


def test_all_policies_are_tested() -> None:
    assert set(SETTINGS) <= set(OURS)


@pytest.mark.parametrize("policy", sorted(OURS))
def test_a_policy_schedules_live(policy: str, launch: Launch, tmp_path: Path) -> None:
    """Two jobs on two types of devices, one of which may mix them: both get devices of their tenant, and keep their bits."""
    write_script(tmp_path)
    jobs = [
        spec(tmp_path, 30, 0.2, name="mixes", virtual_workers=2, min=1, mix_types=True),
        spec(tmp_path, 30, 0.2, name="plain", virtual_workers=2, min=1),
    ]
    with running(tmp_path, "cpu:2,other:2", SETTINGS.get(policy, policy), spare=2) as daemon:
        ids = [daemon.service.submit(job, "me").id for job in jobs]
        for id_ in ids:
            until(
                daemon,
                lambda id_=id_: daemon.cluster.ask(  # type: ignore[misc]
                    lambda state: any(job.id == id_ and job.devices for job in state.jobs.values())
                ),
                f"{id_} has devices of its tenant",
            )
        for job in jobs:
            hurry(job)
        records = finished(daemon, *ids)
    assert [record.step for record in records] == [30, 30]
    assert [record.digest for record in records] == [fixed(launch, job) for job in jobs]

"""What was recorded is decided again, exactly; and a scheduler that decides otherwise is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.sched.recording import TickRecorder, replay
from gyrostat.sim.failures import failures
from gyrostat.sim.job import TraceJob
from gyrostat.sim.setup import Setup, read_setup
from gyrostat.sim.simulate import simulate
from tests.sched.little_cluster import request

NODES = {"a": 2, "b": 1}


def record(path: Path, policy: str, sharing: str) -> int:
    setup = Setup(cluster="by-load:3", nodes=NODES, sharing=sharing, policy=policy)
    fleet, vcs, placer = setup.parts()
    jobs = [
        TraceJob(request(f"j{k}", 2 ** (k % 4), at=7.0 * k, vc="ab"[k % 3 == 0]), 20.0 + 37 * k % 101)
        for k in range(60)
    ]
    with TickRecorder(path, setup.to_json()) as recorder:
        result = simulate(
            fleet,
            vcs,
            placer,
            jobs,
            watchers=(recorder,),
            changes=[failures(fleet, between=500.0, repair=50.0, seed=3)],
        )
    assert len(result.records) == 60
    return result.ticks


@pytest.mark.parametrize("sharing", ["cells", "quota", "private"])
@pytest.mark.parametrize(
    "policy", ["fifo", "tiresias:queues=50/500,promote=2", "gandiva:packed=0.7", "fifo;a=gittins"]
)
def test_every_plan_is_decided_again(policy: str, sharing: str, tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    ticks = record(path, policy, sharing)
    found = replay(path, lambda setup: read_setup(setup).scheduler_state())
    assert found.difference is None, found.difference
    assert found.ticks == ticks
    assert found.actions >= 60


@pytest.mark.parametrize(
    "policy",
    [
        "elastic-tiresias:queues=50/500,crowd=1",
        "easyscale",
        "wfs:by=srtf",
        "gavel:mixed=yes,round=30",
        "optimus",
    ],
)
def test_so_is_every_plan_for_elastic_jobs(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    setup = Setup(cluster="by-load:3", nodes=NODES, sharing="cells", policy=policy, overhead=0.1)
    fleet, vcs, placer = setup.parts()
    jobs = [
        TraceJob(
            request(
                f"j{k}", 2 ** (k % 4), at=7.0 * k, vc="ab"[k % 3 == 0], smallest=1, largest=8, soft=k % 2 == 0
            ),
            20.0 + 37 * k % 101,
        )
        for k in range(40)
    ]
    with TickRecorder(path, setup.to_json()) as recorder:
        result = simulate(fleet, vcs, placer, jobs, throughput=setup.throughput, watchers=(recorder,))
    assert len(result.records) == 40
    found = replay(path, lambda setup: read_setup(setup).scheduler_state())
    assert found.difference is None, found.difference
    assert (found.ticks, found.actions >= 40) == (result.ticks, True)


def test_a_scheduler_that_decides_otherwise_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    record(path, "fifo", "cells")
    found = replay(path, lambda setup: read_setup({**setup, "policy": "fifo:backfill=yes"}).scheduler_state())
    assert found.difference is not None
    assert found.difference.recorded != found.difference.replayed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no recording of ticks"),
        ("{}\n", "no recording of ticks"),
        ("nonsense\n", "line 1 is no JSON object"),
        (
            '{"format": "gyrostat-ticks-1", "setup": {"odd": 1}}\n',
            "this version does not write such a setup",
        ),
    ],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        replay(path, lambda setup: read_setup(setup).scheduler_state())

"""Real jobs on a real cluster: whatever the scheduler does to them, they end with the bits of an undisturbed run."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.layout import read_layout
from gyrostat.cluster.records import JobState
from gyrostat.core.errors import NoSuchJob, Unplaceable, UsageError, WrongState
from gyrostat.job.control.client import JobClient
from gyrostat.local.daemon import Daemon
from gyrostat.sched.recording import replay
from tests.conftest import Launch
from tests.local.clusters import SCRIPT, at_step, finished, fixed, hurry, running, spec, until, write_script

_GOES_ON = (JobState.RUNNING, JobState.FINISHED)
_TENANTS = """
cell_types:
  box: {of: cpu, count: 2, node: true}
physical_cluster:
  - {cell: box, nodes: [b0, b1]}
virtual_clusters:
  vision: {cells: {box: 1}}
  speech: {cells: {box: 1}}
"""


def kinds(daemon: Daemon, id_: str) -> list[str]:
    return [event.kind for event in daemon.service.events(None) if event.job == id_]


def test_six_jobs_on_four_slots_end_as_if_undisturbed_and_replay_equally(
    launch: Launch, tmp_path: Path
) -> None:
    """Elastic weighted fair sharing, different sizes and priorities."""
    write_script(tmp_path)
    jobs = [
        spec(tmp_path, steps, pause, virtual_workers=workers, priority=priority, name=f"n{number}")
        for number, (steps, pause, workers, priority) in enumerate(
            [
                (100, 0.1, 4, 1),
                (40, 0.02, 2, 5),
                (50, 0.02, 4, 1),
                (30, 0.02, 1, 10),
                (30, 0.02, 3, 2),
                (40, 0.02, 8, 5),
            ]
        )
    ]
    with running(tmp_path, policy="wfs", spare=2) as daemon:
        first = daemon.service.submit(jobs[0], "me")
        at_step(daemon, first.id, 5)
        ids = [first.id, *(daemon.service.submit(job, "me").id for job in jobs[1:])]
        until(daemon, lambda: {"resized", "moved"} <= set(kinds(daemon, first.id)), "is disturbed")
        hurry(jobs[0])
        records = finished(daemon, *ids)
        (recording,) = daemon.home.recording_files()
        layout, policy = daemon.layout, daemon.policy
    assert [record.digest for record in records] == [fixed(launch, job) for job in jobs]
    assert [record.step for record in records] == [int(job.args[0]) for job in jobs]

    def build(setup: Mapping[str, Any]) -> Any:
        assert setup == layout.setup(policy)
        return read_layout(setup["cluster"]).scheduler_state(setup["policy"])

    replayed = replay(recording, build)
    assert replayed.difference is None
    assert replayed.actions >= 8


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [3, pytest.param(50, marks=pytest.mark.full)])
def test_serving_load_comes_and_goes(launch: Launch, tmp_path: Path, times: int) -> None:
    """Devices are free when `reserve` says so, no job fails, and bits stay."""
    write_script(tmp_path)
    jobs = [spec(tmp_path, 50 + 20 * times, 0.1, name=name) for name in "ab"]
    with running(tmp_path, spare=2) as daemon:
        ids = [daemon.service.submit(job, "me").id for job in jobs]
        for id_ in ids:
            at_step(daemon, id_, 1)
        for turn in range(times):
            wanted = (2, 4, 3)[turn % 3]
            assert daemon.service.reserve("cpu", wanted, wait=60.0)
            reserved = [device for device in daemon.service.devices() if device.reserved]
            assert len(reserved) == wanted
            assert all(device.job is None for device in reserved)
            daemon.service.reserve("cpu", 0)
            until(
                daemon,
                lambda: all(daemon.service.job(id_, None).state in _GOES_ON for id_ in ids),
                "go on",
            )
        for job in jobs:
            hurry(job)
        records = finished(daemon, *ids)
        assert all("failed" not in kinds(daemon, id_) for id_ in ids)
    assert [record.digest for record in records] == [fixed(launch, job) for job in jobs]


def test_tenants_get_what_is_theirs_back_from_an_opportunistic_job(launch: Launch, tmp_path: Path) -> None:
    """Speech's job grows over the cells of both tenants. It shrinks when vision's comes, and leaves for one of its own
    tenant; it goes on afterwards, and keeps its bits."""
    write_script(tmp_path)
    low = spec(tmp_path, 120, 0.05, opportunistic=True, name="low")
    theirs = spec(tmp_path, 60, 0.5, virtual_workers=2, min=2, name="theirs")
    own = spec(tmp_path, 60, 0.5, virtual_workers=2, min=2, name="own")
    with running(tmp_path, read_layout(_TENANTS), spare=2) as daemon:
        service = daemon.service
        service.submit(low, "speech")
        until(daemon, lambda: service.job("low", "speech").workers == 4, "grows on unused devices")
        assert service.job("low", "speech").borrowed == (0, 1, 2, 3)
        service.submit(theirs, "vision")
        at_step(daemon, "theirs", 1)
        given = service.job("theirs", "vision")
        left = service.job("low", "speech")
        assert (given.vc, len(given.devices), given.borrowed) == ("vision", 2, ())
        assert {*given.devices, *left.devices} == {0, 1, 2, 3}
        assert (left.state, left.attempts) == (JobState.RUNNING, 1)
        with pytest.raises(NoSuchJob, match="there is no job 'low'"):
            service.job("low", "vision")
        service.submit(own, "speech")
        at_step(daemon, "own", 1)
        assert service.job("own", "speech").devices == left.devices
        assert service.job("low", "speech").state is JobState.SUSPENDED
        waiting = service.why_waiting("low", "speech")
        assert waiting is not None
        assert "no other job uses" in waiting.why
        for job in (low, theirs, own):
            hurry(job)
        records = finished(daemon, "low", "theirs", "own")
    assert [record.digest for record in records] == [fixed(launch, job) for job in (low, theirs, own)]


def test_pause_scale_and_resume(launch: Launch, tmp_path: Path) -> None:
    write_script(tmp_path)
    job = spec(tmp_path, 150, 0.1)
    with running(tmp_path) as daemon:
        service = daemon.service
        id_ = service.submit(job, "me").id
        at_step(daemon, id_, 3)
        assert service.job(id_, "me").devices == (0, 1, 2, 3)
        service.pause(id_, "me")
        until(daemon, lambda: service.job(id_, "me").state is JobState.PAUSED, "pauses")
        assert all(device.job is None for device in service.devices())
        paused = service.job(id_, "me").step
        service.scale(id_, "me", min=2, max=2)
        service.resume(id_, "me")
        at_step(daemon, id_, paused + 3)
        assert len(service.job(id_, "me").devices) == 2
        service.scale(id_, "me", min=1, max=1)
        until(daemon, lambda: service.job(id_, "me").workers == 1, "shrinks")
        service.scale(id_, "me", min=3, max=4)
        until(daemon, lambda: service.job(id_, "me").workers == 4, "grows")
        assert service.job(id_, "me").attempts == 2, "it was started again for it"
        answer = service.migrate(id_, "me")
        assert answer.done
        hurry(job)
        (record,) = finished(daemon, id_)
        with pytest.raises(WrongState, match="has finished already"):
            service.pause(id_, "me")
    assert record.digest == fixed(launch, job)


def test_migrating_and_profiling_leave_one_worker_on_every_device(launch: Launch, tmp_path: Path) -> None:
    """Twice each: workers that replace others take their devices. The cluster has nothing to repair afterwards."""
    write_script(tmp_path)
    job = spec(tmp_path, 2000, 0.02, name="n")
    with running(tmp_path) as daemon:
        service = daemon.service
        id_ = service.submit(job, "me").id
        at_step(daemon, id_, 1)
        with JobClient(id_, at=daemon.home.control_sockets) as client:

            def devices() -> list[int]:
                return sorted(client.status().devices)

            for _ in range(2):
                assert service.migrate(id_, "me").done
                assert devices() == [0, 1, 2, 3]
                service.profile(id_, "me", smallest=1, largest=4, steps=1)
                assert devices() == [0, 1, 2, 3]
        at_step(daemon, id_, service.job(id_, "me").step + 3)
        events = [event for event in service.events(None) if event.job == id_]
        assert [event for event in events if event.kind in ("moved", "not moved", "trouble")] == []
        hurry(job)
        (record,) = finished(daemon, id_)
    assert record.digest == fixed(launch, job)


def test_failures_are_reported_retried_and_given_up(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text("print('nearly there')\nraise ValueError('no such thing')\n")
    (tmp_path / "once.py").write_text(
        "import pathlib, sys\nmark = pathlib.Path('mark')\n"
        "if not mark.exists():\n    mark.touch()\n    sys.exit(3)\n"
        "import gyrostat, torch\njob = gyrostat.init()\njob.track(model=torch.nn.Linear(1, 1))\n"
    )
    with running(tmp_path) as daemon:
        service = daemon.service
        breaks = service.submit(JobSpec(script="breaks.py", workdir=str(tmp_path), retries=5), "me")
        once = service.submit(JobSpec(script="once.py", workdir=str(tmp_path), retries=1), "me")
        until(daemon, lambda: all(job.state.over for job in service.jobs(None)), "ends")
        broken, done = service.job(breaks.id, None), service.job(once.id, None)
    assert broken.state is JobState.FAILED
    assert broken.exit_code == 1
    assert broken.retries == 1, "an error that repeats is not tried a third time"
    assert "ValueError: no such thing; the same error after the same step as before" in broken.reason
    assert "nearly there" in broken.last_lines
    assert done.state is JobState.FINISHED
    assert (done.retries, done.attempts) == (1, 2)


def test_time_limits_and_cancelling(tmp_path: Path) -> None:
    write_script(tmp_path)
    with running(tmp_path, "cpu:2") as daemon:
        service = daemon.service
        limited = service.submit(spec(tmp_path, 100_000, virtual_workers=1, time_limit=1.5), "me")
        endless = service.submit(spec(tmp_path, 100_000, virtual_workers=1), "me")
        queued = service.submit(spec(tmp_path, 100_000, virtual_workers=2, min=2), "me")
        at_step(daemon, endless.id, 1)
        service.cancel(endless.id, "me")
        service.cancel(queued.id, "me")
        until(daemon, lambda: all(job.state.over for job in service.jobs(None)), "ends")
        states = [service.job(each.id, None).state for each in (limited, endless, queued)]
        assert states == [JobState.FAILED, JobState.CANCELLED, JobState.CANCELLED]
        assert service.job(limited.id, None).reason == "its time limit of 1.5 s with devices is over"
        assert all(device.job is None for device in service.devices())


def test_what_can_never_run_is_refused(tmp_path: Path) -> None:
    write_script(tmp_path)
    with running(tmp_path, "cpu:2,slow:1@10", spare=0) as daemon:
        service = daemon.service
        with pytest.raises(
            Unplaceable, match="needs at least 3 devices, and virtual cluster 'default' has 2 cpu, 1 slow"
        ):
            service.submit(spec(tmp_path, 1, min=3), "me")
        with pytest.raises(Unplaceable, match="no devices of type gpu here; there are cpu, slow"):
            service.submit(spec(tmp_path, 1, types=("gpu",)), "me")
        with pytest.raises(UsageError, match="no virtual cluster 'defualt'; did you mean 'default'"):
            service.submit(spec(tmp_path, 1, vc="defualt"), "me")
        with pytest.raises(UsageError, match="there is no script"):
            service.submit(spec(tmp_path.parent, 1), "me")
        with pytest.raises(UsageError, match="absolute path without"):
            service.submit(JobSpec(script="train.py", workdir=f"{tmp_path}/../x"), "me")
        with pytest.raises(NoSuchJob, match="there is no job 'j1'"):
            service.job("j1", None)
        with pytest.raises(UsageError, match="of 1 slow devices, 0 to 1 can be reserved; got 2"):
            service.reserve("slow", 2)
        assert service.jobs(None) == []


def test_ended_jobs_are_kept_for_a_set_time(tmp_path: Path) -> None:
    write_script(tmp_path)
    with running(tmp_path, "cpu:1", spare=0, keep=0.0) as daemon:
        daemon.service.reserve("cpu", 1)
        for _ in range(2):
            daemon.service.submit(spec(tmp_path, 1, virtual_workers=1), "me")
        daemon.home.job("j1").mkdir()
        daemon.service.cancel("j1", "me")
        until(daemon, lambda: daemon.service.job("j1", "me").state is JobState.CANCELLED, "is cancelled")
        daemon.clean_up()
        assert [job.id for job in daemon.service.jobs(None)] == ["j2"]
        assert not daemon.home.job("j1").exists()


def test_slots_keep_their_pace(tmp_path: Path) -> None:
    """The daemon knows which worker is on which device: two jobs, each on a slot of its own pace."""
    clocked = SCRIPT.replace("for epoch in", "began = time.monotonic()\nfor epoch in")
    write_script(tmp_path, clocked + "open(f'{hurry}.took', 'w').write(str(time.monotonic() - began))\n")
    with running(tmp_path, "fast:1@3000,slow:1@300", spare=2) as daemon:
        ids = [
            daemon.service.submit(
                spec(tmp_path, 60, 0.0, virtual_workers=1, types=(type_,), name=type_), "me"
            ).id
            for type_ in ("fast", "slow")
        ]
        fast, slow = finished(daemon, *ids)
        assert "running" in kinds(daemon, fast.id)  # even if it ran from one look to the next
    assert fast.digest == slow.digest
    assert float((tmp_path / "hurry-slow.took").read_text()) >= 50 * 3 / 300


def test_submissions_are_accepted_in_milliseconds(tmp_path: Path) -> None:
    """Not a benchmark: a queue of hundreds must not slow the daemon down by an order of magnitude."""
    write_script(tmp_path)
    with running(tmp_path, "cpu:1", policy="fifo", spare=0) as daemon:
        daemon.service.reserve("cpu", 1)
        began = time.process_time()
        for _ in range(300):
            daemon.service.submit(spec(tmp_path, 1), "me")
        assert len(daemon.service.jobs("me")) == 300
        assert daemon.service.jobs("other") == []

        def position() -> int:
            waiting = daemon.service.why_waiting("j300", "me")
            assert waiting is not None
            return waiting.position

        until(daemon, lambda: position() == 300, "all have been looked at")
        assert time.process_time() - began < 30


def test_the_example_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[2]
    (block,) = re.findall(r"```python\n(.*?)```", (root / "docs/howto/cluster.md").read_text(), re.DOTALL)
    monkeypatch.chdir(root)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    exec(compile(block, "docs/howto/cluster.md", "exec"), {})
    assert re.fullmatch(r"finished [0-9a-f]{64}\n", capsys.readouterr().out)

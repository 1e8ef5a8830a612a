"""Server jobs of `gyrostat run`, as real processes: killed, stopped, scaled and resumed, with every sample counted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gyrostat.core.phase import JobPhase
from gyrostat.job.control.requests import Status
from tests.job.server_job.counting import EPOCHS, SAMPLES, SCRIPT, UPDATES, CountingRun, events

SLOW = 0.01


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an undisturbed run with one worker and one server."""
    with CountingRun(tmp_path_factory.mktemp("alone"), "--servers", "1", "--workers", "1") as run:
        report = run.check_complete()
    assert (report["workers"], report["servers"], report["samples"]) == (1, 1, EPOCHS * SAMPLES)
    assert report["events"] == []
    found: str = report["digest"]
    return found


def test_workers_and_servers_share_the_job(tmp_path: Path, digest: str) -> None:
    with CountingRun(tmp_path, "--servers", "2", "--workers", "3", "--server-cores", "2") as run:
        report = run.check_complete()
    assert report["digest"] == digest
    assert (report["workers"], report["servers"], report["samples"]) == (3, 2, EPOCHS * SAMPLES)
    assert report["exit_codes"] == [0, 0, 0]
    assert len(report["losses"]) == UPDATES
    assert f"gyrostat: {UPDATES} updates" in run.log()
    assert "3 workers and 2 servers" in run.log()


def test_killed_workers_are_replaced_and_nothing_is_lost_or_counted_twice(
    tmp_path: Path, digest: str
) -> None:
    with CountingRun(
        tmp_path, "--servers", "2", "--workers", "3", "--poison-limit", "0", seconds_per_batch=SLOW
    ) as run:
        for update in range(20, UPDATES - 40, 40):
            run.until_update(update)
            run.kill(run.workers()[:1])
        report = run.check_complete()
    assert report["digest"] == digest
    died = events(report, "failure", "worker")
    assert len(died) == len(range(20, UPDATES - 40, 40))
    assert all("was killed by SIGKILL" in event["reason"] for event in died)
    assert sorted(report["exit_codes"]).count(-signal.SIGKILL) == len(died)


def test_all_workers_killed_at_once(tmp_path: Path, digest: str) -> None:
    with CountingRun(tmp_path, "--servers", "1", "--workers", "3", seconds_per_batch=SLOW) as run:
        run.until_update(30)
        run.kill(run.workers())
        report = run.check_complete()
    assert report["digest"] == digest
    assert len(events(report, "failure", "worker")) == 3


def test_the_fork_server_killed_with_all_workers(tmp_path: Path, digest: str) -> None:
    with CountingRun(tmp_path, "--servers", "1", "--workers", "2", seconds_per_batch=SLOW) as run:
        run.until_update(30)
        run.kill(run.processes.fork_servers())
        report = run.check_complete()
    assert report["digest"] == digest


def _in_place(status: Status) -> bool:
    """Both servers have slots, and with replicas every slot has its copy."""
    servers = status.servers or ()
    return len(servers) == 2 and all(server.slots for server in servers) and status.servers_settled


@pytest.mark.parametrize("recovery", ["exact", "partial", "replica"])
def test_killed_servers_are_replaced_by_each_kind_of_recovery(
    tmp_path: Path, digest: str, recovery: str
) -> None:
    with CountingRun(
        tmp_path,
        *("--servers", "2", "--workers", "2", "--server-recovery", recovery),
        *("--checkpoint-dir", "ckpt", "--checkpoint-every", "25"),
        seconds_per_batch=SLOW,
    ) as run:
        for update in (40, 100, 170):
            run.until_update(update)
            run.hold()
            run.until(_in_place, what="2 servers in place")
            run.kill(run.servers()[:1])
            run.release()
        report = run.check_complete()
    assert report["digest"] == digest
    died = events(report, "failure", "server")
    assert len(died) == 3
    rolled = events(report, "roll_back", "server")
    assert len(rolled) == (0 if recovery == "replica" else 3)
    assert report["servers"] == 2


def test_a_stopped_worker_and_a_stopped_server_are_given_up(tmp_path: Path, digest: str) -> None:
    with CountingRun(
        tmp_path, "--servers", "2", "--workers", "2", "--heartbeat-timeout", "1", seconds_per_batch=SLOW
    ) as run:
        run.until_update(20)
        run.kill(run.workers()[:1], signal.SIGSTOP)
        run.kill(run.servers()[:1], signal.SIGSTOP)
        report = run.check_complete()
    assert report["digest"] == digest
    assert any("silent for 1 s" in event["reason"] for event in events(report, "failure", "worker"))
    assert any("silent" in event["reason"] for event in events(report, "failure", "server"))


def test_workers_and_servers_are_scaled_while_it_trains(tmp_path: Path, digest: str) -> None:
    with CountingRun(tmp_path, "--servers", "1", "--workers", "1", seconds_per_batch=SLOW) as run:
        run.until_update(10)
        run.hold()
        with run.client as client:
            grown = client.scale_roles(3, 3)
            assert (grown.done, grown.workers) == (True, 3), grown.text
            status = client.status()
            assert (status.workers, len(status.servers or ())) == (3, 3)
            assert all(server.slots for server in status.servers or ())
            bad = client.scale_roles(servers=-3, relative=True)
            assert (bad.done, bad.invalid) == (False, True)
            shrunk = client.scale_roles(-1, -2, relative=True)
            assert (shrunk.done, shrunk.workers) == (True, 2), shrunk.text
            assert len(client.status().servers or ()) == 1
        run.release()
        report = run.check_complete()
    assert report["digest"] == digest
    assert (report["workers"], report["servers"]) == (2, 1)
    assert [(event["from"], event["to"]) for event in events(report, "resize", "worker")] == [(1, 3), (3, 2)]
    assert [(event["from"], event["to"]) for event in events(report, "resize", "server")] == [(1, 3), (3, 1)]


def test_no_workers_for_a_while(tmp_path: Path, digest: str) -> None:
    with CountingRun(tmp_path, "--servers", "1", "--workers", "2", seconds_per_batch=SLOW) as run:
        run.until_update(10)
        run.hold()
        with run.client as client:
            assert client.scale(0).done
            status = client.status()
            assert (status.workers, status.phase) == (0, JobPhase.TRAINING)
            assert run.workers() == []
            assert client.scale(2).done
        run.release()
        report = run.check_complete()
    assert report["digest"] == digest


def test_a_schedule_counts_updates(tmp_path: Path, digest: str) -> None:
    with CountingRun(
        tmp_path, "--servers", "1", "--schedule", "0:1,30:3,120:2", seconds_per_batch=SLOW
    ) as run:
        report = run.check_complete()
    assert report["digest"] == digest
    assert [(event["from"], event["to"]) for event in events(report, "resize", "worker")] == [(1, 3), (3, 2)]


def test_stopped_by_request_and_resumed_on_other_numbers(tmp_path: Path, digest: str) -> None:
    options = ("--checkpoint-dir", "ckpt")
    with CountingRun(tmp_path, "--servers", "2", "--workers", "2", *options, seconds_per_batch=SLOW) as run:
        run.until_update(50)
        with run.client as client:
            assert client.stop().done
        assert run.wait() == 143
        report = run.report()
        assert report["digest"] is None
        assert report["checkpoints"]
        assert report["stopped_by"] == "SIGTERM"
        assert "stopped by request after step" in run.log()
        done = report["steps"]
        assert done >= 50
    with CountingRun(tmp_path, "--servers", "3", "--workers", "1", *options) as run:
        report = run.check_complete()
    assert report["digest"] == digest
    assert report["first_step"] == done
    assert report["resumed_from"] == str(tmp_path / "ckpt" / Path(report["resumed_from"]).name)
    assert report["samples"] == EPOCHS * SAMPLES - done * (EPOCHS * SAMPLES // UPDATES)


def test_ctrl_c_reaches_the_whole_group_and_the_last_checkpoint_is_written(
    tmp_path: Path, digest: str
) -> None:
    options = ("--servers", "2", "--workers", "2", "--checkpoint-dir", "ckpt")
    with CountingRun(tmp_path, *options, seconds_per_batch=SLOW) as run:
        run.until_update(30)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait() == 130
        done = run.report()["steps"]
        assert events(run.report(), "failure") == []
    with CountingRun(tmp_path, *options) as run:
        report = run.check_complete()
    assert (report["digest"], report["first_step"]) == (digest, done)


def test_a_checkpoint_by_request_and_a_killed_leader(tmp_path: Path, digest: str) -> None:
    options = ("--servers", "2", "--workers", "2", "--checkpoint-dir", "ckpt")
    with CountingRun(tmp_path, *options, seconds_per_batch=SLOW) as run:
        run.until_update(40)
        with run.client as client:
            assert client.checkpoint().done
        while not list((tmp_path / "ckpt").glob("servers-*.json")):
            assert run.process.poll() is None
        run.process.kill()
        assert run.wait() == -signal.SIGKILL
    with CountingRun(tmp_path, *options) as run:
        report = run.check_complete()
    assert report["digest"] == digest
    assert report["first_step"] >= 40


def test_interrupted_twice_it_ends_at_once(tmp_path: Path) -> None:
    with CountingRun(tmp_path, "--servers", "1", "--workers", "2", seconds_per_batch=5.0) as run:
        run.until(lambda status: status.phase is JobPhase.TRAINING)
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.report()["digest"] is None


def test_a_poison_batch_is_named_and_ends_the_job(tmp_path: Path) -> None:
    with CountingRun(tmp_path, "--servers", "1", "--workers", "2", env={"POISON": "777"}) as run:
        assert run.wait() == 137
        report = run.report()
    assert report["failure"]["cause"] == "poison"
    assert "3 workers have died of the same work" in report["failure"]["summary"]
    assert 777 in report["failure"]["evidence"]["running"]["samples"]
    assert report["digest"] is None
    assert not (tmp_path / "counts.json").exists()


def test_a_script_that_raises_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    script = SCRIPT.replace("time.sleep(seconds)", "raise ValueError('not today')")
    with CountingRun(tmp_path, "--servers", "1", "--workers", "2", script=script) as run:
        assert run.wait() == 1
        assert "ValueError: not today" in run.log()
        assert run.report()["failure"]["cause"] == "raised"


def test_a_script_without_servers_is_refused(tmp_path: Path) -> None:
    with CountingRun(tmp_path, "--servers", "1", script="print('hello')") as run:
        assert run.wait() == 2
        assert "never called gyrostat.servers(job)" in run.log()
        assert "Traceback" not in run.log()


def test_a_worker_that_dies_before_it_trains_again_and_again_ends_the_job(tmp_path: Path) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with CountingRun(tmp_path, "--servers", "1", "--restarts", "1", script=script) as run:
        assert run.wait() == 137
        assert "2 workers in a row have died without progress of the job" in run.log()

"""A job with real processes: exactly once, resumed on another number of servers, scaled, evaluated, saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.ps.client.local import LocalServers
from gyrostat.ps.client.port import ParameterServers
from gyrostat.ps.control.status import PsEventKind
from gyrostat.ps.protocol.evaluation import EvaluationKey
from tests.ps.live import PATIENCE, CountingJob, LiveJob, check_counts, open_worker, settings, train

JOB = CountingJob()


def _digest(servers: ParameterServers, epochs: int) -> str:
    train(servers, JOB, lambda: epochs)
    check_counts(servers, JOB, epochs)
    found = servers.digest()
    servers.close()
    return found


def _local_digest(epochs: int) -> str:
    servers = LocalServers()
    open_worker(servers, JOB)
    return _digest(servers, epochs)


def _told(job: LiveJob, ask: Callable[[Callable[[str | None], None]], None]) -> str | None:
    """What the leader tells its owner in the end."""
    told: list[str | None] = []
    done = threading.Event()

    def tell(result: str | None) -> None:
        told.append(result)
        done.set()

    job.call(lambda: ask(tell))
    assert done.wait(PATIENCE)
    return told[0]


def test_one_worker_and_one_server(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path)) as job:
        servers = job.connect(JOB)
        assert servers.progress.is_main
        assert train(servers, JOB, lambda: 3) == 3 * JOB.batches
        assert servers.progress.updates == 3 * JOB.batches
        check_counts(servers, JOB, 3)
        servers.close()
        job.wait(lambda _: job.leader.finished, "the end")


def test_workers_that_are_processes_and_several_servers(tmp_path: Path) -> None:
    (tmp_path / "epochs").write_text("4")
    with LiveJob(settings(tmp_path, servers=2, cores=2)) as job:
        workers = [job.start_worker(JOB, f"worker-{number}", tmp_path) for number in range(2)]
        assert [worker.wait() for worker in workers] == [0, 0]
        assert _digest(job.connect(JOB), 4) == _local_digest(4)
        assert job.count(PsEventKind.WORKER_LEFT) == 3


def test_resumed_on_another_number_of_servers(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path, servers=3)) as job:
        assert job.leader.resumed_from is None
        servers = job.connect(JOB)
        train(servers, JOB, lambda: 1)
        before = servers.digest()
        assert _told(job, job.leader.checkpoint) is None
        assert job.events[-1].kind is PsEventKind.CHECKPOINT
    newest = sorted(tmp_path.glob("servers-*.json"))[-1]
    with LiveJob(settings(tmp_path, servers=1)) as job:
        assert job.leader.resumed_from == str(newest)
        servers = job.connect(JOB)
        assert servers.progress.epoch == 0
        assert servers.digest() == before
        assert _digest(servers, 3) == _local_digest(3)
        assert job.status().samples == 2 * JOB.samples
    other = CountingJob(batch_size=8)
    with LiveJob(settings(tmp_path)) as job, pytest.raises(UsageError, match="of another job: tables"):
        job.connect(other)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path)) as job:
        servers = job.connect(JOB)
        train(servers, JOB, lambda: 1)
        servers.save()
    *_, older, newest = sorted(tmp_path.glob("servers-*.json"))
    newest.write_bytes(newest.read_bytes()[:-20])
    with LiveJob(settings(tmp_path)) as job:
        assert job.leader.resumed_from == str(older)
        assert str(newest) in job.leader.refused[0]
        assert _digest(job.connect(JOB), 2) == _local_digest(2)


def test_servers_are_added_removed_and_replaced_while_a_worker_trains(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path)) as job:
        servers = job.connect(JOB)
        thread = threading.Thread(target=train, args=(servers, JOB, lambda: 12))
        thread.start()
        assert _told(job, lambda done: job.leader.scale(3, done=done)) is None
        assert sorted(server.slots for server in job.status().servers) == [2, 3, 3]
        assert _told(job, lambda done: job.leader.scale(1, done=done)) is None
        bigger = job.call(lambda: job.leader.replace("server-1", cores=2))
        job.wait(lambda status: [each.name for each in status.servers] == [bigger], "replaced")
        (server,) = job.status().servers
        assert (server.cores, server.slots, len(server.pids)) == (2, 8, 2)
        thread.join()
        assert _digest(servers, 12) == _local_digest(12)
        assert job.count(PsEventKind.ROLLED_BACK) == 0


def test_an_evaluation_is_divided_among_workers(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path, servers=2)) as job:
        first, second = job.connect(JOB, "first"), job.connect(JOB, "second")
        assert (first.progress.is_main, second.progress.is_main) == (True, False)
        train(first, JOB, lambda: 1)
        key = EvaluationKey(0, 0)
        parts = [servers.evaluate_next(key, 10, 4) for servers in (first, second)]
        assert parts == [range(4), range(4, 8)]
        second.close()  # it does not report: its part goes to another
        for part in (parts[0], first.evaluate_next(key, 10, 4), first.evaluate_next(key, 10, 4)):
            assert part is not None
            first.evaluate_report(key, part, repr(part).encode())
        assert first.evaluate_next(key, 10, 4) is None
        assert first.evaluate_results(key) == [b"range(0, 4)", b"range(4, 8)", b"range(8, 10)"]
        late = job.connect(JOB, "late")
        assert late.evaluate_next(key, 10, 4) is None
        assert late.evaluate_results(key) == first.evaluate_results(key)


def test_a_worker_of_another_job_is_refused(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path)) as job:
        servers = job.connect(JOB)
        with pytest.raises(UsageError, match="other data than the job"):
            job.connect(CountingJob(shard_size=32), "other")
        train(servers, JOB, lambda: 1)
        check_counts(servers, JOB, 1)


def test_a_worker_that_was_given_up_cannot_come_back(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path)) as job:
        servers = job.connect(JOB, "first")
        shard = servers.next_shard(0)
        assert job.call(lambda: job.leader.held_by("first")) == shard
        job.call(lambda: job.leader.give_up_worker("first"))
        assert job.call(lambda: job.leader.held_by("first")) == shard
        with pytest.raises(UsageError, match="was given up"):
            job.connect(JOB, "first")
        other = job.connect(JOB, "other")
        assert train(other, JOB, lambda: 1) == JOB.batches


def test_a_full_disk_fails_the_checkpoint_and_not_the_job(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    with LiveJob(settings(directory)) as job:
        servers = job.connect(JOB)
        servers.next_shard(0)
        directory.rename(tmp_path / "elsewhere")
        reason = _told(job, job.leader.checkpoint)
        assert reason is not None
        assert "No such file" in reason
        assert job.count(PsEventKind.CHECKPOINT_FAILED) == 1
        (tmp_path / "elsewhere").rename(directory)
        assert _told(job, job.leader.checkpoint) is None

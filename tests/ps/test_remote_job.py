"""A job with real processes, undisturbed: exactly once, resumed, scaled, evaluated."""

from __future__ import annotations

from pathlib import Path

from tests.ps.live import CountingJob, LiveJob, check_counts, settings, train

JOB = CountingJob()


def test_one_worker_and_one_server(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path)) as job:
        servers = job.connect(JOB)
        assert train(servers, JOB) == JOB.epochs * JOB.batches
        check_counts(servers, JOB)
        servers.close()
        job.wait(lambda _: job.leader.finished, "the end")


def test_workers_that_are_processes_and_several_servers(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path, servers=2, cores=2)) as job:
        workers = [job.start_worker(JOB, f"worker-{number}") for number in range(2)]
        assert [worker.wait() for worker in workers] == [0, 0]
        servers = job.connect(JOB)
        check_counts(servers, JOB)
        servers.close()

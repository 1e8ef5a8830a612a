"""A job with real processes, undisturbed: exactly once, resumed, scaled, evaluated."""

from __future__ import annotations

from pathlib import Path

from gyrostat.ps.control.status import PsEventKind
from tests.ps.live import CountingJob, LiveJob, check_counts, settings, train

JOB = CountingJob()


def test_one_worker_and_one_server(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path)) as job:
        servers = job.connect(JOB)
        assert train(servers, JOB, lambda: 3) == 3 * JOB.batches
        check_counts(servers, JOB, 3)
        servers.close()
        job.wait(lambda _: job.leader.finished, "the end")


def test_workers_that_are_processes_and_several_servers(tmp_path: Path) -> None:
    (tmp_path / "epochs").write_text("4")
    with LiveJob(settings(tmp_path, servers=2, cores=2)) as job:
        workers = [job.start_worker(JOB, f"worker-{number}", tmp_path) for number in range(2)]
        assert [worker.wait() for worker in workers] == [0, 0]
        servers = job.connect(JOB)
        check_counts(servers, JOB, 4)
        servers.close()
        assert job.count(PsEventKind.WORKER_LEFT) == 3

"""Every role killed with SIGKILL at every phase, by each way of recovery: every batch of every epoch is applied once.

The hits are counted and printed (`-s`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gyrostat.ps.control.status import PsEventKind, PsStatus
from gyrostat.ps.protocol.coordinator import ServerRecovery
from tests.ps import kill_points, leader_process
from tests.ps.kill_points import Armed
from tests.ps.leader_process import start_leader
from tests.ps.live import PATIENCE, CountingJob, LiveJob, check_counts, settings, start_worker, train

JOB = CountingJob()
SERVER_POINTS = (*kill_points.PUSH_AND_PULL, *kill_points.CHECKPOINT, *kill_points.MIGRATION)


class Trained:
    """A job that trains with two servers and two worker processes, of which those that were killed are replaced."""

    def __init__(self, job: LiveJob, directory: Path) -> None:
        self.job, self.directory, self.armed = job, directory, Armed(directory)
        self.workers = 0
        self.epochs(1_000_000)
        for _ in range(2):
            self.start_worker()

    def epochs(self, number: int) -> None:
        beside = self.directory / ".epochs"
        beside.write_text(str(number))
        beside.rename(self.directory / "epochs")

    def start_worker(self) -> None:
        self.workers += 1
        self.job.start_worker(JOB, f"worker-{self.workers}", self.directory)

    def replace_workers(self) -> None:
        for worker in self.job.workers:
            if worker.poll() == -signal.SIGKILL:
                self.job.workers.remove(worker)
                self.start_worker()

    def progress(self, batches: int = 40) -> None:
        """Until so many more batches are trained, by whatever is left and replaced."""
        start = self.job.status().updates

        def more(status: PsStatus) -> bool:
            self.replace_workers()
            return status.updates >= start + batches

        self.job.wait(more, "progress")

    def kill_at(self, *points: str) -> None:
        """Training and checkpoints go on, and moves if it is a point of a move, until processes have reached the points."""
        for point in points:
            self.armed.arm(point)

        def hit(status: PsStatus) -> bool:
            if points[0] in kill_points.MIGRATION:
                if status.moving == 0 and all(server.slots for server in status.servers):
                    self.job.call(lambda: self.job.leader.scale(3 if len(status.servers) == 2 else 2))
            else:
                self.job.call(self.job.leader.checkpoint)
            self.replace_workers()
            return all(map(self.armed.is_hit, points))

        self.job.wait(hit, " and ".join(points))

    def settle(self) -> None:
        """Two servers, nothing moves, and every slot has its mirror, if it should."""
        self.job.call(lambda: self.job.leader.scale(2))

        def settled(status: PsStatus) -> bool:
            self.replace_workers()
            return status.settled and [server.slots > 0 for server in status.servers] == [True, True]

        self.job.wait(settled, "settled")

    def finish(self) -> None:
        """All workers reach the end of an epoch; then everything is counted."""
        last = self.job.status().epoch + 2
        self.epochs(last)
        for worker in self.job.workers:
            worker.wait()
            assert worker.returncode == 0
        servers = self.job.connect(JOB)
        check_counts(servers, JOB, last)
        servers.close()


@pytest.mark.parametrize("recovery", list(ServerRecovery))
def test_servers_killed_at_every_phase(tmp_path: Path, recovery: ServerRecovery) -> None:
    command = (*kill_points.COMMAND, str(tmp_path))
    replica = recovery is ServerRecovery.REPLICA
    points = SERVER_POINTS + (kill_points.MIRROR if replica else kill_points.RELOAD)
    with LiveJob(settings(tmp_path, servers=2, recovery=recovery, server_command=command)) as job:
        trained = Trained(job, tmp_path)
        trained.progress()
        for point in points:
            trained.settle()
            before = job.count(PsEventKind.ROLLED_BACK)
            if point in kill_points.RELOAD:
                trained.kill_at("exchange received")  # others read files then
            trained.kill_at(point)
            trained.progress()
            rolled_back = job.count(PsEventKind.ROLLED_BACK) - before
            print(f"{recovery}: killed a server at: {point}; roll-backs: {rolled_back}")
            if replica and point not in kill_points.MIGRATION:
                assert rolled_back == 0
        trained.finish()
        lost = job.count(PsEventKind.SERVER_LOST)
        print(f"{recovery}: {lost} servers killed, {job.count(PsEventKind.ROLLED_BACK)} roll-backs")
        assert lost >= len(points)


def test_workers_killed_at_every_phase(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path, servers=2)) as job:
        trained = Trained(job, tmp_path)
        trained.progress()
        for point in kill_points.WORKER:
            trained.kill_at(point)
            trained.progress()
            print(f"killed a worker at: {point}")
        trained.finish()
        assert job.count(PsEventKind.WORKER_LOST) == len(kill_points.WORKER)
        assert job.count(PsEventKind.ROLLED_BACK) == 0


@pytest.mark.parametrize("recovery", list(ServerRecovery))
def test_a_stopped_server_is_given_up(tmp_path: Path, recovery: ServerRecovery) -> None:
    with LiveJob(settings(tmp_path, servers=2, recovery=recovery, server_timeout=1.0)) as job:
        trained = Trained(job, tmp_path)
        trained.progress()
        (pid,) = job.status().servers[0].pids
        os.kill(pid, signal.SIGSTOP)
        job.wait(lambda _: job.count(PsEventKind.SERVER_LOST) == 1, "the server is given up")
        trained.progress()
        trained.finish()


def test_a_stopped_worker_loses_its_shard_and_may_come_back(tmp_path: Path) -> None:
    with LiveJob(settings(tmp_path, servers=2, lease_seconds=1.0)) as job:
        trained = Trained(job, tmp_path)
        trained.progress()
        stopped = job.workers[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        epoch = job.status().epoch
        job.wait(lambda status: status.epoch >= epoch + 2, "epochs without the stopped worker")
        os.kill(stopped.pid, signal.SIGCONT)
        trained.progress()
        trained.finish()


def test_the_leader_killed_at_every_phase(tmp_path: Path) -> None:
    """Servers and workers end with it; the next one resumes on another number of servers."""
    armed = Armed(tmp_path)
    (tmp_path / "epochs").write_text("1000000")
    for number, point in enumerate(leader_process.POINTS):
        leader, access = start_leader(tmp_path, 1 + number % 3)
        worker = start_worker(JOB, access.address, access.token, "worker", tmp_path)
        try:
            _wait(lambda: bool(list(tmp_path.glob("servers-*.json"))), "a checkpoint")
            pids = _children(leader.pid)
            armed.arm(point)
            assert leader.wait(PATIENCE) == -signal.SIGKILL
            assert worker.wait(PATIENCE) == 1
            deadline = time.monotonic() + PATIENCE
            while any(map(_runs, pids)):
                assert time.monotonic() < deadline, "servers do not end without a leader"
                time.sleep(0.01)
            print(f"killed the leader at: {point}; {len(pids)} servers ended with it")
        finally:
            for process in (leader, worker):
                process.kill()
                process.wait()
    with LiveJob(settings(tmp_path, servers=2)) as job:
        epochs = job.connect(JOB).progress.epoch + 2
        servers = job.connect(JOB, "last")
        train(servers, JOB, lambda: epochs)
        check_counts(servers, JOB, epochs)


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False

"""Shards are served while leaders die: every sample with exactly one update."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyrostat.core.phase import JobPhase
from gyrostat.data.shards.messages import Shard
from gyrostat.job.control.client import JobClient, RequestFailed
from gyrostat.job.control.shard_service import PullShard
from tests.job.agents import Agents

SAMPLES, SHARD = 3000, 10


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    """Of a job that waits for a third node, so that nothing is trained meanwhile."""
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "train.py").write_text("")
    made = Agents(tmp_path, f"file://{tmp_path}/store", ["--lease", "2", "--nodes", "3", "train.py"])
    yield made
    made.close()


class Puller(threading.Thread):
    """Trains an epoch. Pauses half-way until a file lets it continue."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.trained: Counter[int] = Counter()
        self.half, self.on = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with JobClient("job") as job:
                self._train(job)
        except BaseException as error:
            self.failure = error
        finally:
            self.half.set()

    def _train(self, job: JobClient) -> None:
        job.open_shards("train", SAMPLES, shard_size=SHARD, seed=2)
        number, held = 0, list[Shard]()
        while True:
            offsets = tuple((shard.lease, len(shard)) for shard in held)
            answer = job.pull_shard(PullShard("train", self.name, number, epoch=0, offsets=offsets))
            assert answer.accepted, answer.reason
            for shard in held:
                self.trained.update(range(shard.start, shard.stop))
            if answer.epoch_over:
                return
            held = [] if answer.shard is None else [answer.shard]
            number += 1
            if number == SAMPLES // SHARD // 6:
                self.half.set()
            if number > SAMPLES // SHARD // 6 + 5:
                self.on.wait()


def test_leaders_are_killed(agents: Agents) -> None:
    a, b = agents.start("a"), agents.start("b")
    for agent in (a, b):
        agent.wait_for("leading|following")
    with JobClient("job") as job_client:
        status = job_client.status()
        assert (status.phase, status.workers) == (JobPhase.WAITING_FOR_NODES, 0)
        assert job_client.scale(1).text == "the job has not begun yet; retry"
    leader, other = (a, b) if status.pid == a.process.pid else (b, a)
    pullers = [Puller(name) for name in ("x", "y", "z")]
    for puller in pullers:
        puller.half.wait()
    leader.kill()
    for puller in pullers:
        puller.on.set()
    other.wait_for("leading")
    for puller in pullers:
        puller.join()
        assert puller.failure is None
    assert sum((puller.trained for puller in pullers), Counter()) == Counter(range(SAMPLES))
    with JobClient("job") as job_client, pytest.raises(RequestFailed, match="open with other values"):
        job_client.open_shards("train", SAMPLES + 1, shard_size=SHARD)

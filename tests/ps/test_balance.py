"""Hot and slow servers: the rule, its evidence, and a slow server that is replaced while a job trains."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from gyrostat.ps.control.balance import Remedy, ServerObservation, StragglerRule
from gyrostat.ps.control.status import PsEventKind
from tests.ps.live import CountingJob, LiveJob, check_counts, settings, train


def _server(name: str, waited: float, rows: float, heaviest: float = 0.1) -> ServerObservation:
    return ServerObservation(
        name=name,
        cores=1,
        seconds=5.0,
        busy=0.25,
        cpu=0.9,
        rows=rows,
        waited=waited,
        response_ms=1.5,
        heaviest_slot=heaviest,
    )


OTHERS = [_server("b", 0.4, 1e6), _server("c", 0.44, 1.1e6)]


@pytest.mark.parametrize(
    ("hot", "remedy", "words"),
    [
        (_server("a", 0.9, 2.2e6), Remedy.MOVE_SLOTS, "it has 2.1 times their load; some of its slots move"),
        (_server("a", 0.9, 2.2e6, 0.8), Remedy.MORE_CORES, "80% of it in one slot; it gets another core"),
        (_server("a", 0.9, 1e6), Remedy.REPLACE, "it has their load, so its machine is slow; another"),
    ],
)
def test_the_cause_decides_the_treatment(hot: ServerObservation, remedy: Remedy, words: str) -> None:
    found = StragglerRule().decide([hot, *OTHERS])
    assert found is not None
    assert (found.server, found.remedy) == ("a", remedy)
    assert words in found.reason
    assert found.reason.startswith("workers wait for a for 90% of their time, for the others 42%: ")
    assert len(found.evidence) == 3
    assert found.evidence[1] == (
        "b: 1 cores, answers within 1.5 ms, workers wait for it for 40% of their time; 25% busy, "
        "1,000,000 rows/s per core, CPU for 90% of the busy time"
    )


@pytest.mark.parametrize(
    "servers",
    [
        [],
        [_server("a", 0.9, 2e6)],
        [_server("a", 0.6, 1e6), *OTHERS],
        [_server("a", 0.1, 1e6), _server("b", 0.01, 1e6), _server("c", 0.02, 1e6)],
    ],
    ids=["none", "one", "hardly later", "nobody waits"],
)
def test_others_are_left_in_peace(servers: list[ServerObservation]) -> None:
    assert StragglerRule().decide(servers) is None


class Slow:
    """A process that gets a fifth of the time."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(0.002):
                os.kill(self._pid, signal.SIGSTOP)
                self._ended.wait(0.008)
                os.kill(self._pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def test_a_slow_server_is_replaced_while_a_worker_trains(tmp_path: Path) -> None:
    job_size = CountingJob(samples=2048, batch_size=64, shard_size=1024)
    with LiveJob(settings(tmp_path, servers=3, adjust_seconds=1.0)) as job:
        servers = job.connect(job_size)
        epochs = [1_000_000]
        thread = threading.Thread(target=train, args=(servers, job_size, lambda: epochs[0]))
        slow = Slow(job.status().servers[1].pids[0])
        thread.start()
        try:
            job.wait(lambda _: job.count(PsEventKind.SERVER_TREATED) > 0, "the slow server is noticed")
        finally:
            slow.end()
            epochs[0] = job.status().epoch + 3
            thread.join()
        event = next(each for each in job.events if each.kind is PsEventKind.SERVER_TREATED)
        print(event)
        assert event.name == "server-2"
        assert "another server takes its place" in event.reason
        assert len(event.evidence) == 3
        job.wait(lambda status: "server-2" not in [each.name for each in status.servers], "replaced")
        check_counts(servers, job_size, epochs[0])
        assert job.count(PsEventKind.ROLLED_BACK) == 0

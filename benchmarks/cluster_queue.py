"""A cluster with 1,000 queued jobs: how fast they are submitted, how fast `jobs` answers, and what the daemon costs when idle.

A real `gyrostat up`, asked through its API. All its devices are reserved for a serving load, so that jobs wait. A round submits
1,000 jobs, one after the other over one connection, each durable before it is answered; then asks for all jobs, time and again;
then leaves the daemon alone and looks at its CPU time. The peers are the figures to reach. `--quick` submits 200.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from figures import Figure, Options, Target, main
from gyrostat.cluster.client import ClusterClient
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.local.home import Home
from pairs import Pair, show_progress

JOBS = 1_000
SUBMITTED_PER_S = 100.0
ANSWER_MS = 100.0
IDLE_SHARE = 0.02
_DEVICES = 4
_ANSWERS = 20
_IDLE_S = 10.0
_MAIN = "from gyrostat.cli.main import main; main()"


def measure(options: Options) -> list[Figure]:
    jobs = JOBS // 5 if options.quick else JOBS
    rates, answers, idle = [], [], []
    for number in range(options.pairs):
        with (
            tempfile.TemporaryDirectory(prefix="gyrostat-queue-") as directory,
            up(Path(directory)) as (daemon, cluster),
        ):
            cluster.reserve("cpu", _DEVICES, wait=30)
            rates.append(Pair(submit(cluster, Path(directory), jobs), SUBMITTED_PER_S))
            answers.append(Pair(milliseconds_per_answer(cluster, jobs), ANSWER_MS))
            idle.append(Pair(share_of_a_core(daemon, 1.0 if options.quick else _IDLE_S), IDLE_SHARE))
        show_progress(
            number + 1,
            options.pairs,
            f"{rates[-1].ours:.0f} jobs/s, {answers[-1].ours:.1f} ms, {100 * idle[-1].ours:.2f} % of a core",
        )
    return [
        Figure(
            name=f"jobs submitted per second, {jobs} of them",
            ours="submitted",
            theirs="to reach",
            unit="jobs/s",
            pairs=rates,
            target=Target(at_least=1.0),
        ),
        Figure(
            name=f"`jobs` with {jobs} queued jobs, until all are decoded",
            ours="answer",
            theirs="to reach",
            unit="ms",
            pairs=answers,
            target=Target(at_most=1.0),
        ),
        Figure(
            name=f"CPU of the idle daemon with {jobs} queued jobs",
            ours="share",
            theirs="to reach",
            unit="of a core",
            pairs=idle,
            target=Target(at_most=1.0),
        ),
    ]


@contextmanager
def up(directory: Path) -> Iterator[tuple[int, ClusterClient]]:
    """A cluster of its own; the daemon's process and a client."""
    home = Home(directory / "state")
    command = [sys.executable, "-c", _MAIN, "up", "--devices", f"cpu:{_DEVICES}", "--state", str(home.path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
        try:
            while (endpoint := home.endpoint()) is None:
                assert daemon.poll() is None, "the daemon did not start"
                time.sleep(0.05)
            with ClusterClient(endpoint.url) as cluster:
                yield daemon.pid, cluster
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()


def submit(cluster: ClusterClient, directory: Path, jobs: int) -> float:
    """Jobs per second."""
    (directory / "train.py").write_text("raise SystemExit('nobody runs this')\n")
    began = time.perf_counter()
    for number in range(jobs):
        cluster.submit(
            JobSpec(script="train.py", name=f"job-{number}", virtual_workers=4, workdir=str(directory))
        )
    return jobs / (time.perf_counter() - began)


def milliseconds_per_answer(cluster: ClusterClient, jobs: int) -> float:
    """The mean of several."""
    began = time.perf_counter()
    for _ in range(_ANSWERS):
        assert len(cluster.jobs(ended=False)) == jobs
    return 1e3 * (time.perf_counter() - began) / _ANSWERS


def share_of_a_core(process: int, seconds: float) -> float:
    """What a process takes while nobody asks it for anything."""
    before, began = cpu_seconds(process), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds(process) - before) / (time.perf_counter() - began)


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)

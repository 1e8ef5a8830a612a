"""A straggler among the workers, and one among the servers, of a job with parameter servers: its completion time against the
paper's static configuration (DLRover, section 6.2).

Worker at 25 % speed: one of four paced workers takes four times as long for a batch. Ours: shards on demand. Baseline: the data
is split evenly and the slow worker is left alone, so the job takes as long as the slow worker needs for its quarter; that is
what is run. Server at 25 % of its time: one of two servers is stopped for 75 of every 100 ms. Ours: it is found and replaced
(`--server-adjust`). Baseline: it is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from figures import Figure, Options, Target, main
from gyrostat.core.errors import GyrostatError
from gyrostat.job.control.client import JobClient
from pairs import measure_pairs

_SCRIPT = Path(__file__).with_name("side_server_straggler.py")
_RUN = (sys.executable, "-c", "from gyrostat.cli.main import main; main()", "run", "--quiet")
_WORKERS, _SLOW, _PACE = 4, 4.0, 0.02
_ON_S, _OFF_S = 0.025, 0.075
_BEST_OF_PAPER = 1 - 0.42


def completion_time(samples: int, slow: float, *options: str, name: str | None = None) -> float:
    """Seconds from the start of training to the last update."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        named = ("--name", name) if name is not None else ()
        command = [
            *_RUN,
            *named,
            "--report",
            str(report),
            *options,
            str(_SCRIPT),
            str(samples),
            str(_PACE),
            str(slow),
        ]
        subprocess.run(command, check=True)
        found: float = json.loads(report.read_text())["seconds"]
        return found


@contextlib.contextmanager
def slow_server(name: str) -> Iterator[None]:
    """The first server of the job is stopped for 75 of every 100 ms, from its first update on."""
    over = threading.Event()

    def slow() -> None:
        pid = None
        while not over.is_set():
            if pid is None:
                pid = _first_server(name)
                over.wait(0.05)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                over.wait(_OFF_S)
                os.kill(pid, signal.SIGCONT)
            over.wait(_ON_S)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _first_server(name: str) -> int | None:
    try:
        with JobClient(name) as client:
            status = client.status()
    except GyrostatError:
        return None
    return status.servers[0].pids[0] if status.step and status.servers else None


def measure(options: Options) -> Iterable[Figure]:
    samples = 32 * (160 if options.quick else 800)
    yield Figure(
        name="one of 4 workers at 25 % speed: completion time",
        ours="shards on demand",
        theirs="data split evenly",
        unit="s",
        pairs=measure_pairs(
            lambda: completion_time(samples, _SLOW, "--servers", "1", "--workers", str(_WORKERS)),
            lambda: completion_time(samples // _WORKERS, _SLOW, "--servers", "1", "--workers", "1"),
            options.pairs,
        ),
        target=Target(at_most=_BEST_OF_PAPER),
    )

    def with_slow_server(adjust: str) -> float:
        name = f"straggler-{os.getpid()}"
        with slow_server(name):
            size = ("--servers", "2", "--workers", str(_WORKERS), "--server-adjust", adjust)
            return completion_time(4 * samples, 1.0, *size, name=name)

    yield Figure(
        name="one of 2 servers at 25 % of its time: completion time",
        ours="found and replaced",
        theirs="left alone",
        unit="s",
        pairs=measure_pairs(lambda: with_slow_server("2"), lambda: with_slow_server("0"), options.pairs),
        target=Target(at_most=_BEST_OF_PAPER),
    )


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)

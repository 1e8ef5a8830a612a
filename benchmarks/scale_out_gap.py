"""A scale-out from 1 worker to 2: the longest time between two steps, against torchrun's elastic restart.

torchrun at its best settings: `--monitor-interval 0.1` (its default), no last call to wait out since both nodes that may come
are there, a snapshot in memory after every step, nothing computed. Its shared store is off, for with it a node that comes
later waits for ever (torch 2.13). A second node comes, torchrun ends all workers and starts them anew; the gap is between the
last step before and the first one after. Ours is the longest time between any two steps, from the request on, of a job as
small as theirs on paced devices; a step takes 20 ms on one worker, on both sides.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from elastic_job import SMALL, ElasticJob
from figures import Figure, Options, Target, main
from gyrostat.job.processes.start import WorkerForkServer
from pairs import measure_pairs
from sides import HERE, ONE_THREAD

TARGET = Target(at_most=1 / 50)
STEP_S = 0.02
_SHARED_MEMORY = Path("/dev/shm")


def measure(options: Options) -> list[Figure]:
    with WorkerForkServer() as parent:
        job = ElasticJob(parent, virtual_workers=2, workers=1, paced=(2 * 4 / STEP_S,), args=SMALL)
        with job:

            def ours() -> float:
                job.scale(1)
                return job.scale(2).longest

            pairs = measure_pairs(ours, torchrun, options.pairs)
    return [
        Figure(
            name="1 to 2 workers: the longest time between two steps",
            ours="gyrostat",
            theirs="torchrun",
            unit="s",
            pairs=pairs,
            target=TARGET,
        )
    ]


def torchrun() -> float:
    """Start a node, let it train, start another; the gap between steps on one and on two workers."""
    where = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where) as directory:
        port = _free_port()
        nodes = [_node(port, directory)]
        try:
            _wait_for_steps(directory, nodes, workers=1, count=5)
            nodes.append(_node(port, directory))
            times = _wait_for_steps(directory, nodes, workers=2, count=3)
        finally:
            for node in nodes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGTERM)
            for node in nodes:
                node.wait()
    last = max(at for at, workers in times if workers == 1)
    return min(at for at, workers in times if workers == 2) - last


def _node(port: int, directory: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "gap"]
    command += ["--max-restarts", "100", "--monitor-interval", "0.1", "--rdzv-conf", "last_call_timeout=1"]
    command += [str(HERE / "side_torchrun.py"), "--directory", directory, "--step-seconds", str(STEP_S)]
    return subprocess.Popen(
        command,
        env={**os.environ, **ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_for_steps(
    directory: str, nodes: Sequence[subprocess.Popen[bytes]], *, workers: int, count: int
) -> list[tuple[float, int]]:
    """Waits for `steps` steps on `workers` workers; returns all steps so far."""
    deadline = time.monotonic() + 120.0
    file = Path(directory) / "steps"
    while time.monotonic() < deadline and all(node.poll() is None for node in nodes):
        lines = file.read_text().splitlines() if file.exists() else []
        times = [(float(at), int(size)) for at, size in (line.split() for line in lines)]
        if sum(size == workers for _, size in times) >= count:
            return times
        time.sleep(0.05)
    raise RuntimeError(f"torchrun ended, or made no {count} steps on {workers} workers within two minutes")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)

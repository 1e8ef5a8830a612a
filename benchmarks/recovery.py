"""A worker is killed with SIGKILL: how long until the next step is complete, beyond the work that is done again.

2 workers that compute, 4 and 8 that are paced. Measured is the longest time between two steps from the kill to the second
step after it, less what a step takes on the workers that are left, as a job of that size takes for it. The limit is 200 ms.
Beside it, under the same kill of one of two: torchrun (`--max-restarts`, `--monitor-interval 0.1`, a snapshot in memory after
every step; its shared store is off, for with it workers that are started anew wait for ever in torch 2.13) and torchft 0.2
(its own time-outs, and with a heartbeat time-out of 500 ms), whose steps wait as long as a paced step of ours.

torchft is not a dependency of anything here: say where it is with TORCHFT=DIRECTORY (`pip install --target DIRECTORY torchft`),
otherwise it is left out.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from elastic_job import ElasticJob
from figures import Figure, Options, Target, main
from gyrostat.job.control.instructions import ReconfigurationDone
from gyrostat.job.processes.protocol import FromWorker, Hello, Started
from gyrostat.job.processes.start import WorkerForkServer, WorkerSource
from pairs import Pair, show_progress
from sides import HERE, ONE_THREAD

ALLOWED_S = 0.2
WITHIN = Target(at_most=1.0)
MODEL = ("--layers", "8", "--width", "256")
STEP_S = 0.08
"""Of a paced step on all workers, two virtual workers each; of a step of the others, too."""
PACED = (4 * 2 / STEP_S,)
SIZES: tuple[tuple[int, int, Sequence[float]], ...] = ((2, 2, ()), (4, 8, PACED), (8, 16, PACED))
"""Workers, virtual workers, speed of devices that are paced."""
_SHARED_MEMORY = Path("/dev/shm")
_FEW = 3
"""Measurements of the others, which take seconds."""


class Mortal(ElasticJob):
    """A job whose workers can be killed. Another one takes a lost one's place."""

    def __init__(
        self,
        source: WorkerSource,
        workers: int,
        virtual_workers: int,
        paced: Sequence[float],
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        self._pids: dict[int, int] = {}
        self._whole = threading.Event()
        self._size = workers
        self._stopped: list[int] = []
        super().__init__(
            source,
            virtual_workers=virtual_workers,
            workers=workers,
            paced=paced,
            args=MODEL,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, Hello):
            self._pids[worker] = message.pid
        elif isinstance(message, Started):
            self._whole.set()
        super().heard(worker, message)

    def resized(self, done: ReconfigurationDone) -> None:
        if done.after == self._size:
            self._whole.set()

    def hit_one(self, number: int) -> float:
        """Send one worker this signal. The longest time between two steps, from now until the second one is complete."""
        self._whole.wait()
        self.wait_for(self.last_step + 5)
        victim = random.choice(self.job_client.status().members)
        step = self.last_step
        self.wait_until(time.monotonic() + random.random() * STEP_S)  # anywhere in a step
        self._whole.clear()
        killed = time.monotonic()
        os.kill(self._pids[victim], number)
        if number == signal.SIGSTOP:
            self._stopped.append(self._pids[victim])
        while self.completed_at(step) <= killed:
            step += 1
        return max(self.times(step, step + 1))

    def wake(self) -> None:
        """Those that were stopped go on, and find that they are not wanted."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()


def measure(options: Options) -> Iterator[Figure]:
    for workers, virtual_workers, paced in SIZES:
        name = f"one of {workers} workers killed{', paced' if paced else ''}"
        beyond = []
        with WorkerForkServer() as parent:
            with Mortal(parent, workers - 1, virtual_workers, paced) as left:
                step_s = left.steady(20)
            with Mortal(parent, workers, virtual_workers, paced) as job:
                for number in range(options.pairs):
                    gap = job.hit_one(signal.SIGKILL)
                    beyond.append(max(0.0, gap - step_s))
                    text = f"{1e3 * gap:.0f} ms, a step on {workers - 1} takes {1e3 * step_s:.0f}"
                    show_progress(number + 1, options.pairs, text)
        yield Figure(
            name=name,
            ours="gyrostat",
            theirs="allowed",
            unit="s",
            pairs=[Pair(seconds, ALLOWED_S) for seconds in beyond],
            target=WITHIN,
        )
        for other, kill in others(workers) if not paced else ():
            theirs = [kill() for _ in range(min(_FEW, options.pairs))]
            yield Figure(
                name=f"{name}: beside {other}",
                ours="gyrostat",
                theirs=other,
                unit="s",
                pairs=[Pair(*pair) for pair in zip(beyond, theirs, strict=False)],
            )


# The others. A step of theirs takes as long after the kill as before, so what a step takes is taken off, too.


def others(workers: int) -> Iterator[tuple[str, Callable[[], float]]]:
    yield "torchrun", lambda: torchrun(workers)
    where = os.environ.get("TORCHFT")
    if where is None:
        print("note: torchft is left out: TORCHFT does not say where it is installed")
        return
    yield "torchft", lambda: torchft(workers, where, [])
    yield "torchft, heartbeats of 500 ms", lambda: torchft(workers, where, ["--heartbeat-ms", "500"])


def torchrun(workers: int) -> float:
    """All workers are started anew, and go on from the snapshot."""
    with _shared_directory() as directory, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
        command += ["--nproc-per-node", str(workers), "--monitor-interval", "0.1"]
        command += [str(HERE / "side_torchrun.py"), "--directory", str(directory)]
        command += ["--step-seconds", str(workers * STEP_S)]
        stack.enter_context(_running(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}))
        return _kill_and_wait(directory, directory / "steps", workers - 1)


def torchft(workers: int, where: str, options: Sequence[str]) -> float:
    """The others go on without it, after the next quorum."""
    with _shared_directory() as directory, contextlib.ExitStack() as stack:
        command = [sys.executable, str(HERE / "side_torchft.py"), "--directory", str(directory)]
        command += ["--replicas", str(workers), "--step-seconds", str(workers * STEP_S), *options]
        env = {"PYTHONPATH": os.pathsep.join([where, os.environ.get("PYTHONPATH", "")])}
        stack.enter_context(_running([*command, "--lighthouse"], env))
        for replica in range(workers):
            stack.enter_context(_running([*command, "--replica", str(replica)], env))
        return _kill_and_wait(directory, directory / "steps-0", workers - 1)


@contextlib.contextmanager
def _shared_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as directory:
        yield Path(directory)


@contextlib.contextmanager
def _running(command: Sequence[str], env: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        env={**os.environ, **ONE_THREAD, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # then torchrun ends its workers, too
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kill_and_wait(directory: Path, steps: Path, victim: int) -> float:
    """Kill one when steps flow; the gap to the next step that all who are left have made, less a step."""
    before = _steps_after(steps, 0.0, 20)
    killed = time.monotonic()
    os.kill(int((directory / f"pid-{victim}").read_text()), signal.SIGKILL)
    after = _steps_after(steps, killed, 3)
    last = max(at for at in before if at <= killed)
    gaps = [later - earlier for earlier, later in zip([last, *after], after, strict=False)]
    return max(0.0, max(gaps) - STEP_S)


def _steps_after(file: Path, moment: float, count: int) -> list[float]:
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        lines = file.read_text().splitlines() if file.exists() else []
        times = [at for at in (float(line.split()[0]) for line in lines) if at > moment]
        if len(times) >= count:
            return times
        time.sleep(0.02)
    raise RuntimeError(f"{file.name} has no {count} steps within two minutes")


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=10)

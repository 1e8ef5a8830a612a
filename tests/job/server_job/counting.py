"""A server job that counts how often every sample was trained, as real processes of the command line.

With SGD, a learning rate of 1 and a gradient of -1 per sample, the row of a sample is the number of times that it was trained,
and the digest of all rows does not depend on the order of updates. While a file `hold` exists, workers wait in their batch,
unless they are to leave.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gyrostat.core.errors import GyrostatError
from gyrostat.job.chaos.processes import RunProcesses
from gyrostat.job.control.client import JobClient
from gyrostat.job.control.requests import Status

PATIENCE_S = 120.0
GYROSTAT = (sys.executable, "-c", "from gyrostat.cli.main import main; main()")
SAMPLES, EPOCHS, BATCH, SHARD = 1200, 2, 10, 40
UPDATES = EPOCHS * SAMPLES // BATCH
SCRIPT = f"""
import json, os, pathlib, signal, sys, time
import torch
import gyrostat
from gyrostat.engine.script import session
from gyrostat.optim import SGD

seconds = float(os.environ.get("SECONDS_PER_BATCH", "0"))
poison = int(os.environ.get("POISON", "-1"))
job = gyrostat.init(seed=3)
servers = gyrostat.servers(job)
counts = servers.table("counts", width=1, optimizer=SGD(lr=1.0), initial_scale=0.0)
dataset = torch.utils.data.TensorDataset(torch.arange({SAMPLES}))
for epoch in job.epochs({EPOCHS}):
    for step in job.steps(job.shards(dataset, batch_size={BATCH}, shard_size={SHARD})):
        for (ids,) in step:
            time.sleep(seconds)
            while os.path.exists("hold") and not session.stop_requested():
                time.sleep(0.01)
            if (ids == poison).any():
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(-counts(ids).sum())
found = job.evaluate(job.dataloader(dataset, batch_size=100), lambda batch: counts(batch[0]).flatten().tolist())
text = json.dumps([value for values in found for value in values])
path = pathlib.Path(f"counts-{{os.getpid()}}.tmp")
path.write_text(text)
path.rename("counts.json")
"""


class CountingRun:
    """One `gyrostat run` of the script, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        script: str = SCRIPT,
        env: dict[str, str] | None = None,
        seconds_per_batch: float = 0.0,
    ) -> None:
        self.directory = directory
        (directory / "count.py").write_text(script)
        self.processes = RunProcesses(directory)
        self._name = f"count-{os.getpid()}-{directory.name}"
        self._runtime = directory / "runtime"
        self._runtime.mkdir(mode=0o700, exist_ok=True)
        self.report_file = directory / "report.json"
        self.report_file.unlink(missing_ok=True)
        self._log = directory / "run.log"
        environment = {
            **self.processes.environment(),
            "GYROSTAT_RUNTIME_DIR": str(self._runtime),
            "SECONDS_PER_BATCH": str(seconds_per_batch),
            **(env or {}),
        }
        environment.pop("PYTHONFAULTHANDLER")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *GYROSTAT,
                    "run",
                    "--name",
                    self._name,
                    "--report",
                    str(self.report_file),
                    *options,
                    "count.py",
                ],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No process is left, however the test ends."""
        if error is not None:
            print(self.log())
        self.processes.kill_all()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def client(self) -> JobClient:
        return JobClient(self._name, at=self._runtime / "gyrostat")

    def status(self) -> Status | None:
        """None: it does not answer yet, or any more."""
        try:
            with self.client as client:
                return client.status()
        except GyrostatError:
            return None

    def until(self, met: Callable[[Status], Any], *, what: str = "the condition") -> Status:
        """Wait until its status meets this."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"it ended while {what} was waited for:\n{self.log()}"
            if (status := self.status()) is not None and met(status):
                return status
            time.sleep(0.01)
        raise AssertionError(f"{what} was not met within {PATIENCE_S} s: {self.status()}\n{self.log()}")

    def until_update(self, update: int) -> Status:
        return self.until(lambda status: status.step >= update, what=f"update {update}")

    def hold(self) -> None:
        """Workers wait in their batches until `release`."""
        (self.directory / "hold").touch()

    def release(self) -> None:
        (self.directory / "hold").unlink()

    def workers(self) -> list[int]:
        return self.processes.workers(self.processes.fork_servers())

    def servers(self) -> list[int]:
        return [one.pid for one in self.processes.living() if "gyrostat.ps.server" in one.command]

    def kill(self, pids: Sequence[int], number: int = signal.SIGKILL) -> None:
        for pid in pids:
            assert self.processes.signal(pid, number), pid

    def wait(self) -> int:
        """Its exit code. Nothing of it is left."""
        code = self.process.wait(PATIENCE_S)
        living = self.processes.living()
        deadline = time.monotonic() + 10.0
        while (
            living and time.monotonic() < deadline
        ):  # a process that was killed with its parent takes a moment
            living = self.processes.living()
        assert living == []
        return code

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.report_file.read_text())
        return found

    def counts(self) -> list[float]:
        """How often each sample was trained."""
        found: list[float] = json.loads((self.directory / "counts.json").read_text())
        return found

    def check_complete(self) -> dict[str, Any]:
        """It ended well, and every sample was trained exactly once per epoch."""
        code = self.wait()
        assert code == 0, self.log()
        assert self.counts() == [float(EPOCHS)] * SAMPLES
        report = self.report()
        assert report["steps"] == UPDATES
        assert report["digest"] is not None
        return report


def events(report: dict[str, Any], kind: str, role: str | None = None) -> list[dict[str, Any]]:
    return [
        event
        for event in report["events"]
        if event["kind"] == kind and (role is None or event.get("role") == role)
    ]

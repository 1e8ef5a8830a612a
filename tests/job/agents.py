"""Agents as their users start them: `gyrostat run --store …`, one process per node, all on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gyrostat.job.control.control_socket import runtime_directory

NODE_TIMEOUT_S = 120.0
_MAIN = "from gyrostat.cli.main import main; main()"

TRAINING = """
    import os
    import sys
    import time

    import torch

    import gyrostat
    from gyrostat.engine.reconfigure.membership import Membership

    RANK = int(os.environ["RANK"])
    PACE = float(os.environ.get("PACE", "0"))  # leaves the cores to what is tested


    def wait_at(place):  # until the test opens that gate, if it has made one
        try:
            with open(f"{place}-{RANK}.fifo") as gate:
                gate.read()
        except FileNotFoundError:
            pass


    def waiting_first(place, method):
        def wait(*args):
            wait_at(place)
            return method(*args)

        return wait


    wait_at("starting")
    Membership.prepare = waiting_first("connecting", Membership.prepare)
    Membership.set_fence = waiting_first("fenced", Membership.set_fence)

    job = gyrostat.init(seed=5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(96, 6)), batch_size=4, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(1_000_000):
        for step in job.steps(loader):
            for (x,) in step:
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if job.is_main:
                print("at", time.monotonic(), flush=True)
            time.sleep(PACE)
"""


class AgentProcess:
    """One agent, seen from a test. What it prints is kept; `wait_for` waits for a line."""

    def __init__(
        self,
        directory: Path,
        node: str,
        options: Sequence[str],
        *,
        prefix: Sequence[str] = (),
    ) -> None:
        """`options`: all that comes after `gyrostat run --node NODE`. `prefix`: a command to run it by."""
        self.node = node
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._seen = 0
        self._ended = False
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _MAIN, "run", "--node", node, *options],
            cwd=directory,
            env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "PACE": "0.01"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip())
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def wait_for(self, pattern: str) -> str:
        """The next line that matches."""
        deadline = time.monotonic() + NODE_TIMEOUT_S
        with self._more:
            while True:
                while self._seen < len(self.lines):
                    line = self.lines[self._seen]
                    self._seen += 1
                    if re.search(pattern, line):
                        return line
                came = not self._ended and self._more.wait(max(0.0, deadline - time.monotonic()))
                assert came, f"{self.node} never said {pattern!r}: {self._said()}"

    def _said(self) -> list[str]:
        """By itself, without what workers print."""
        return [line for line in self.lines if not line.endswith(tuple("0123456789")) or "gyrostat:" in line]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """The agent alone: its fork server and its workers live on, and may still print."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(NODE_TIMEOUT_S)

    def finish(self) -> int:
        """Its exit code."""
        code = self.process.wait(NODE_TIMEOUT_S)
        self._reader.join(NODE_TIMEOUT_S)
        assert self._ended
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Agents:
    """The agents of one test. Whatever happens, none of their processes is left."""

    def __init__(self, directory: Path, store: str, options: Sequence[str]) -> None:
        self._directory, self._store, self._options = directory, store, options
        self._started: list[AgentProcess] = []

    def start(self, node: str, *, prefix: Sequence[str] = ()) -> AgentProcess:
        """`prefix`: a command to run it by."""
        options = ["--store", self._store, "--name", "job", *self._options]
        self._started.append(AgentProcess(self._directory, node, options, prefix=prefix))
        return self._started[-1]

    def close(self) -> None:
        for agent in self._started:
            if agent.process.poll() is None:
                agent.kill()
        for node in {agent.node for agent in self._started}:
            end_fork_server(node)
        for agent in self._started:
            agent.finish()


def end_fork_server(node: str) -> None:
    """And with it all workers of the node."""
    from gyrostat.job.processes.start import WorkerForkServer

    parent = WorkerForkServer.adopt(runtime_directory() / f"job.{node}" / "fork-server.socket")
    if parent is not None:
        parent.close()

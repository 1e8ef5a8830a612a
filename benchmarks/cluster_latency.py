"""A warm cluster on one machine: from `submit` to the first training step; from a serving load's request to free devices; and
until a host has been forked.

A daemon with a host ready runs a small job to its first step, time and again. Then two elastic jobs fill four slots, and a
serving load asks for two, four and three of them in turn, and gives them back: jobs shrink, or checkpoint and leave.
Last, the fork server forks hosts, one after the other, as for every job. The peers are the figures to reach.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from pathlib import Path

from figures import Figure, Options, Target, main
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.local.daemon import Daemon
from gyrostat.local.environment import job_environment
from gyrostat.local.home import Home
from gyrostat.local.host_fork_server import HostForkServer
from gyrostat.local.layout import layout_of_slots
from pairs import Pair, show_progress

FIRST_STEP_S, FREE_S, HOST_S = 2.0, 3.0, 0.1
DEVICES = 4
WISHES = (2, 4, 3)
SCRIPT = """
import time
import torch
import gyrostat

job = gyrostat.init(seed=1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(4096, 4), torch.randint(2, (4096,)))
loader = job.dataloader(data, batch_size=2, shuffle=True)
job.track(model=model, optimizer=optimizer)
for epoch in job.epochs(1_000_000):
    for step in job.steps(loader):
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""


def measure(options: Options) -> list[Figure]:
    starts, frees, hosts = [], [], []
    with tempfile.TemporaryDirectory(prefix="gyrostat-latency-") as directory:
        (Path(directory) / "train.py").write_text(SCRIPT)
        layout = layout_of_slots(f"cpu:{DEVICES}")
        with Daemon(Home(Path(directory) / "state"), layout, "wfs", spare=2) as daemon:
            job = JobSpec(script="train.py", workdir=directory, virtual_workers=2)
            for number in range(options.pairs):
                daemon.await_ready(120.0)
                starts.append(Pair(first_step(daemon, job), FIRST_STEP_S))
                show_progress(number + 1, options.pairs, f"first step after {starts[-1].ours:.2f} s")
            ids = [submit(daemon, job) for _ in range(2)]
            for number in range(options.pairs):
                for id_ in ids:
                    at_step(daemon, id_, daemon.service.job(id_, None).step + 1)
                frees.append(Pair(free(daemon, WISHES[number % len(WISHES)]), FREE_S))
                show_progress(number + 1, options.pairs, f"free after {frees[-1].ours:.2f} s")
            for id_ in ids:
                end(daemon, id_)
            daemon.service.shutdown()
        with contextlib.closing(Warm(Path(directory) / "log")) as fork_server:
            for number in range(options.pairs):
                hosts.append(Pair(fork_server.host_ready(), HOST_S))
                show_progress(number + 1, options.pairs, f"a host after {hosts[-1].ours:.3f} s")
    return [
        Figure(
            name=name,
            ours="took",
            theirs="to reach",
            unit="s",
            pairs=pairs,
            target=Target(at_most=1.0),
        )
        for name, pairs in (
            ("submit to first training step", starts),
            ("serving load asks, devices are free", frees),
            ("a host is forked and ready", hosts),
        )
    ]


def first_step(daemon: Daemon, job: JobSpec) -> float:
    began = time.monotonic()
    id_ = submit(daemon, job)
    at_step(daemon, id_, 1)
    took = time.monotonic() - began
    end(daemon, id_)
    return took


def free(daemon: Daemon, devices: int) -> float:
    began = time.monotonic()
    if not daemon.service.reserve("cpu", devices, wait=120.0):
        raise SystemExit("the devices were not free after two minutes")
    took = time.monotonic() - began
    daemon.service.reserve("cpu", 0)
    return took


class Warm:
    """The fork server of hosts, which has imported everything."""

    def __init__(self, log: Path) -> None:
        self._fork_server = HostForkServer(log, job_environment(os.environ))
        self.host_ready()

    def host_ready(self) -> float:
        """Until a host says so; then it is let go."""
        ours, theirs = socket.socketpair()
        with ours:
            began = time.monotonic()
            with theirs:
                self._fork_server.spawn(theirs)
            if ours.recv(64) != b"ready\n":
                raise SystemExit("no host was forked")
            return time.monotonic() - began

    def close(self) -> None:
        self._fork_server.end()


def submit(daemon: Daemon, job: JobSpec) -> str:
    return daemon.service.submit(job, "bench").id


def at_step(daemon: Daemon, id_: str, step: int) -> None:
    while daemon.service.job(id_, None).step < step:
        daemon.wait(0.005)


def end(daemon: Daemon, id_: str) -> None:
    daemon.service.cancel(id_, None)
    while not daemon.service.job(id_, None).state.over:
        daemon.wait(0.02)


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=12)

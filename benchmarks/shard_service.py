"""CPU of the leader per shard that it hands out, with 256 clients that report one and ask for the next, all at once.

The leader is a real agent (`gyrostat run --store file://…`) whose lease store is a directory, into which the queues are written
before anything is answered. Clients are connections, all in this process: to the leader's own socket, and to that of another
agent, which passes requests on. Measured in CPU time of the leader's process, so that others on the machine hardly matter; the
peer is the budget. `--quick` takes fewer shards.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from figures import Figure, Options, Target, main
from gyrostat.job.control.client import JobClient
from gyrostat.job.control.control_socket import runtime_directory
from gyrostat.job.control.requests import Reply
from gyrostat.job.control.shard_service import Pulled, PullShard
from gyrostat.job.processes.channel import Channel
from pairs import Pair, show_progress

CLIENTS = 256
SHARDS = 20_000
BUDGET_US = 150.0
_QUICK_PAIRS = 3
_QUEUES = "train"
_MAIN = "from gyrostat.cli.main import main; main()"


def measure(options: Options) -> list[Figure]:
    shards = SHARDS // 4 if options.pairs <= _QUICK_PAIRS else SHARDS
    figures = []
    with tempfile.TemporaryDirectory(prefix="gyrostat-shards-") as directory, ExitStack() as stack:
        os.environ["GYROSTAT_RUNTIME_DIR"] = directory
        leader = stack.enter_context(agent(Path(directory), "leader", "leading"))
        stack.enter_context(agent(Path(directory), "other", "following"))
        with JobClient("shards.leader") as job_client:
            job_client.open_shards(_QUEUES, 10**9, shard_size=1000)
        for node, name in (("leader", "at its own socket"), ("other", "through another agent")):
            pairs = []
            for pair in range(options.pairs):
                pairs.append(Pair(microseconds_per_shard(leader, node, pair, shards), BUDGET_US))
                show_progress(pair + 1, options.pairs, f"{name}: {pairs[-1].ours:.1f} µs")
            figures.append(
                Figure(
                    name=f"the leader's CPU per shard handed out and reported, {CLIENTS} clients, {name}",
                    ours="taken",
                    theirs="budget",
                    unit="µs",
                    pairs=pairs,
                    target=Target(at_most=1.0),
                )
            )
    return figures


@contextmanager
def agent(directory: Path, node: str, role: str) -> Iterator[int]:
    """Its process id. The job waits for a third node, which never comes."""
    script = directory / "train.py"
    script.write_text("")
    options = ["--store", f"file://{directory}/store", "--name", "shards", "--node", node, "--nodes", "3"]
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, "run", *options, str(script)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        while role not in (line := process.stderr.readline()):
            assert line, "the agent has ended"
        yield process.pid
    finally:
        process.terminate()
        process.wait()


class Client:
    """One worker: it reports what it holds and asks for the next, again and again."""

    def __init__(self, node: str, name: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(runtime_directory() / f"shards.{node}.socket"))
        self.channel: Channel[Reply] = Channel(sock, Reply)
        self._name, self._number = name, 0
        self._offsets: tuple[tuple[int, int], ...] = ()

    def ask(self) -> None:
        self.channel.send(PullShard(_QUEUES, self._name, self._number, epoch=0, offsets=self._offsets))
        self._number += 1

    def hear(self) -> int:
        """How many shards have come."""
        for reply in self.channel.receive() or ():
            assert isinstance(reply, Pulled)
            assert reply.shard is not None, reply
            self._offsets = ((reply.shard.lease, len(reply.shard)),)
            return 1
        return 0

    def leave(self) -> None:
        self.channel.send(PullShard(_QUEUES, self._name, self._number, epoch=None, leaves=True))
        self.channel.receive()
        self.channel.close()


def microseconds_per_shard(leader: int, node: str, turn: int, shards: int) -> float:
    clients = [Client(node, f"{node}-{turn}-{number}") for number in range(CLIENTS)]
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.channel, selectors.EVENT_READ, client)
            client.ask()
        got, began = 0, cpu_seconds(leader)
        while got < shards:
            for key, _ in selector.select():
                if key.data.hear():
                    got += 1
                    key.data.ask()
        taken = cpu_seconds(leader) - began
        for client in clients:
            while not client.hear():
                pass
    for client in clients:
        client.leave()
    return 1e6 * taken / got


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, the kernel's work for it included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)

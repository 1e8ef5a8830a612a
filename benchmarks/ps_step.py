"""CPU time of a step of one worker and one parameter server, 512 × 26 ids and width 16, Adagrad: against one process with the
same kernels, against `nn.Embedding(sparse=True)` with `torch.optim.Adagrad` in one process, and against a plain parameter
server over torch.distributed.rpc; and how many such steps a core of the server can serve per second.

Worker and server are processes of their own. All sides stay alive and take turns in blocks of steps; the CPU time of all
processes of a side counts, so that others on the machine hardly matter.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from figures import Figure, Options, Target, main
from gyrostat.ps.control.settings import PsSettings
from pairs import Pair, show_progress
from ps_leader import LedJob
from side_ps import SideSettings

_BLOCK = 150
_WARM_UP = 130
_QUICK_BLOCK = 40


class PsSide:
    """The processes of one side: the first makes the steps, the CPU time of all of them counts."""

    def __init__(self, name: str, process: subprocess.Popen[str], others: list[int]) -> None:
        self.name, self.others, self._process = name, others, process
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready", name

    def run(self, steps: int) -> tuple[float, float]:
        """CPU milliseconds per step: of all processes, and of those beside the first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        before = sum(map(cpu_seconds, self.others))
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        mine = float(self._process.stdout.readline())
        others = sum(map(cpu_seconds, self.others)) - before
        return 1e3 * (mine + others) / steps, 1e3 * others / steps


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def start(settings: SideSettings, stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("side_ps.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings).decode() + "\n")
    process.stdin.flush()
    return process


def measure(options: Options) -> list[Figure]:
    steps = _QUICK_BLOCK if options.quick else _BLOCK
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyrostat-ps-")))
        settings = PsSettings(directory=directory, checkpoint_seconds=1e9)
        leader = stack.enter_context(LedJob(settings))
        worker = start(SideSettings("remote", leader.address, leader.token), stack)
        rendezvous = f"file://{directory}/rendezvous"
        rpc_server = start(SideSettings("rpc-server", rendezvous=rendezvous), stack)
        rpc_worker = start(SideSettings("rpc", rendezvous=rendezvous), stack)
        remote = PsSide("remote", worker, [])
        remote.others = list(leader.call(leader.status).servers[0].pids)
        sides = {
            "local": PsSide("local", start(SideSettings("local"), stack), []),
            "embedding": PsSide("embedding", start(SideSettings("embedding"), stack), []),
            "rpc": PsSide("rpc", rpc_worker, [rpc_server.pid]),
        }
        for side in (remote, *sides.values()):
            side.run(_WARM_UP)
        pairs: dict[str, list[Pair]] = {name: [] for name in sides}
        server = []
        for number in range(options.pairs):
            for name, side in sides.items():
                mine_first = number % 2 == 0
                first, second = (remote, side) if mine_first else (side, remote)
                results = first.run(steps), second.run(steps)
                mine, other = results if mine_first else results[::-1]
                pairs[name].append(Pair(mine[0], other[0]))
                server.append(mine[1])
            told = ", ".join(f"{name} {each[-1].ratio:.3f}" for name, each in pairs.items())
            show_progress(number + 1, options.pairs, told)
    unit = "ms of CPU"
    names = {
        "local": ("one process with the same kernels", 1.15),
        "embedding": ("nn.Embedding(sparse=True) + Adagrad in one process", 0.6),
        "rpc": ("a torch-rpc parameter server", 0.5),
    }
    figures = [
        Figure(
            name=f"CPU per step of worker and server together, against {words}",
            ours="worker and server",
            theirs=words,
            unit=unit,
            pairs=pairs[name],
            target=Target(at_most=limit),
        )
        for name, (words, limit) in names.items()
    ]
    per_core = [Pair(1e3 / each, 200.0) for each in server]
    figures.append(
        Figure(
            name="steps per second and server core (1 / CPU per step of the server)",
            ours="served",
            theirs="to reach",
            unit="steps/s",
            pairs=per_core,
            target=Target(at_least=1.0),
        )
    )
    return figures


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=8)

"""The sides of `transformers_throughput.py` and `lightning_throughput.py`: on gyrostat, on its own DDP, or alone."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Options, Target
from pairs import Pair
from sides import HERE, ONE_THREAD
from turns import Side, take_turns

_BATCH = 8
_MANY = 8


def compare_framework(framework: str, options: Options) -> Iterator[Figure]:
    """Two workers against its DDP on two processes; eight virtual workers on one worker against its accumulation."""
    script = str(HERE / f"side_{framework}.py")
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        directory = Path(name)
        yield _compare(
            f"{framework}: gyrostat N=P=2 against its own DDP on 2 processes",
            _ours(script, 2, 2, directory / "ours2"),
            _ddp(script, 2, directory / "ddp"),
            options,
            batches=2,
            target=Target(at_least=0.98),
        )
        yield _compare(
            f"{framework}: gyrostat N={_MANY} P=1 against its own accumulation of {_MANY} batches",
            _ours(script, _MANY, 1, directory / "ours8"),
            _alone(script, directory / "alone"),
            options,
            batches=_MANY,
            target=Target(at_least=0.95),
        )


def _compare(
    what: str, ours: Side, theirs: Side, options: Options, *, batches: int, target: Target
) -> Figure:
    with ours, theirs:
        turns = take_turns(ours, theirs, pairs=options.pairs, block_seconds=options.block_seconds or 1.5)
    samples = _BATCH * batches
    pairs = [Pair(pair.ours * samples, pair.theirs * samples) for pair in turns]
    return Figure(name=what, ours=ours.name, theirs=theirs.name, unit="samples/s", pairs=pairs, target=target)


def _ours(script: str, virtual_workers: int, workers: int, address: Path) -> Side:
    command = [str(Path(sys.executable).with_name("gyrostat")), "run", "--quiet"]
    command += ["--virtual-workers", str(virtual_workers), "--workers", str(workers), script, "--ours"]
    return Side("gyrostat", [command], address=address, processes=workers, env=ONE_THREAD)


def _ddp(script: str, ranks: int, address: Path) -> Side:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = [
        f"WORLD_SIZE={ranks}",
        f"LOCAL_WORLD_SIZE={ranks}",
        "MASTER_ADDR=127.0.0.1",
        f"MASTER_PORT={port}",
    ]
    commands = [
        ["env", f"RANK={rank}", f"LOCAL_RANK={rank}", "NODE_RANK=0", *world, sys.executable, script]
        for rank in range(ranks)
    ]
    return Side("DDP", commands, address=address, processes=ranks, env=ONE_THREAD)


def _alone(script: str, address: Path) -> Side:
    command = [sys.executable, script, "--accumulate", str(_MANY)]
    return Side("accumulation", [command], address=address, processes=1, env=ONE_THREAD)

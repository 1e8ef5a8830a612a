"""The sides of a comparison as processes: gyrostat, plain DDP, and a loop written by hand.

Whichever two a benchmark compares, both train what `workloads.py` describes on one thread per process, and take turns as
`turns.py` says. `compare_throughput` is the usual case: samples per second of two sides that make equally large steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, Options, Target
from pairs import Pair
from turns import Side, take_turns
from workloads import BATCH_SIZES

HERE = Path(__file__).resolve().parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def gyrostat_side(
    workload: str,
    virtual_workers: int,
    workers: int,
    directory: Path,
    *,
    reduction: str = "ddp",
    name: str = "gyrostat",
    more: Sequence[str] = (),
) -> Side:
    """`gyrostat run` with `more` options; its report goes to NAME.json."""
    command = [str(Path(sys.executable).with_name("gyrostat")), "run", "--quiet"]
    command += ["--virtual-workers", str(virtual_workers), "--workers", str(workers)]
    command += ["--reduction", reduction, "--report", f"{directory}/{name}.json", *more]
    command += [str(HERE / "side_gyrostat.py"), workload, "--buffers", f"{directory}/{name}.buffers"]
    return Side(name, [command], address=directory / f"{name}.socket", processes=workers, env=ONE_THREAD)


def ddp_side(workload: str, ranks: int, directory: Path, *, micro_batches: int = 1) -> Side:
    """A process per rank, each with `micro_batches` per step; rank 0's digest goes to ddp.json."""
    command = [sys.executable, str(HERE / "side_ddp.py"), workload, "--ranks", str(ranks)]
    command += ["--micro-batches", str(micro_batches)]
    command += ["--store", f"{directory}/ddp.store", "--report", f"{directory}/ddp.json"]
    commands = [[*command, "--rank", str(rank)] for rank in range(ranks)]
    return Side("DDP", commands, address=directory / "ddp.socket", processes=ranks, env=ONE_THREAD)


def loop_side(workload: str, directory: Path, *, micro_batches: int) -> Side:
    """One process that accumulates gradients over `micro_batches` per step."""
    command = [sys.executable, str(HERE / "side_accumulation.py"), workload]
    command += ["--micro-batches", str(micro_batches)]
    return Side("loop", [command], address=directory / "loop.socket", processes=1, env=ONE_THREAD)


def compare_throughput(
    what: str, ours: Side, theirs: Side, options: Options, *, workload: str, batches: int, target: Target
) -> Figure:
    """Start both sides and let them take turns; a step of either is `batches` batches of the workload."""
    with ours, theirs:
        turns = take_turns(ours, theirs, pairs=options.pairs, block_seconds=options.block_seconds)
    samples = BATCH_SIZES[workload] * batches
    return Figure(
        name=f"{workload}: {what}",
        ours=ours.name,
        theirs=theirs.name,
        unit="samples/s",
        pairs=[Pair(pair.ours * samples, pair.theirs * samples) for pair in turns],
        target=target,
    )

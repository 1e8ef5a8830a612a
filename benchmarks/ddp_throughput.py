"""Throughput of gyrostat on 2 workers with 2 virtual workers, against plain DDP on 2 processes.

Samples per second of the ResNet and the GPT example, one thread per process, both sides alive all the time and taking
turns. Afterwards both must have trained the same bits, which shows that they did the same work.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Options, Target, main
from pairs import Pair
from turns import Side, take_turns
from workloads import BATCH_SIZES

RANKS = 2
TARGET = Target(at_least=0.95)
HERE = Path(__file__).resolve().parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def measure(options: Options) -> Iterator[Figure]:
    for workload in options.workloads:
        yield compare(workload, options)


def compare(workload: str, options: Options) -> Figure:
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        directory = Path(name)
        with (
            gyrostat_side(workload, RANKS, RANKS, directory) as ours,
            ddp_side(workload, RANKS, directory) as theirs,
        ):
            turns = take_turns(ours, theirs, pairs=options.pairs, block_seconds=options.block_seconds)
        check_same_digest(directory / "gyrostat.json", directory / "ddp.json")
    samples = BATCH_SIZES[workload] * RANKS
    return Figure(
        name=f"{workload}: gyrostat P={RANKS} N={RANKS} against DDP P={RANKS}",
        ours="gyrostat",
        theirs="DDP",
        unit="samples/s",
        pairs=[Pair(pair.ours * samples, pair.theirs * samples) for pair in turns],
        target=TARGET,
    )


def gyrostat_side(workload: str, virtual_workers: int, workers: int, directory: Path) -> Side:
    """`gyrostat run` with so many virtual workers on so many workers; its report goes to gyrostat.json."""
    command = [str(Path(sys.executable).with_name("gyrostat")), "run", "--quiet"]
    command += ["--virtual-workers", str(virtual_workers), "--workers", str(workers)]
    command += ["--report", f"{directory}/gyrostat.json"]
    command += [str(HERE / "side_gyrostat.py"), workload]
    return Side(
        "gyrostat", [command], address=directory / "gyrostat.socket", processes=workers, env=ONE_THREAD
    )


def ddp_side(workload: str, ranks: int, directory: Path) -> Side:
    """A process per rank; rank 0's digest goes to ddp.json."""
    command = [sys.executable, str(HERE / "side_ddp.py"), workload, "--ranks", str(ranks)]
    command += ["--store", f"{directory}/ddp.store", "--report", f"{directory}/ddp.json"]
    commands = [[*command, "--rank", str(rank)] for rank in range(ranks)]
    return Side("DDP", commands, address=directory / "ddp.socket", processes=ranks, env=ONE_THREAD)


def check_same_digest(ours: Path, theirs: Path) -> None:
    digests = [json.loads(path.read_text())["digest"] for path in (ours, theirs)]
    if digests[0] != digests[1]:
        raise SystemExit(f"the sides did not do the same work: digests {digests[0]} and {digests[1]}")
    print(f"both sides ended with the digest {digests[0]}")


if __name__ == "__main__":
    main(__doc__ or "", measure, workloads=list(BATCH_SIZES))

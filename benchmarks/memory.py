"""Peak memory of one worker with sixteen virtual workers, against one; a model of 38 MiB with AdamW.

The kernel's own high-water mark of the worker's resident memory (`ru_maxrss`), for the tree order and beside it for
DDP's; and what sixteen plain DDP processes on the same machine need, added up. Resident memory counts shared libraries once per
process, so the proportional share (PSS) of these processes after the same steps is reported too. The gradient buffers that the
tree folds with are counted in the worker: one, and at most log2 V more.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, Options, Target, main
from pairs import Pair, show_progress
from sides import ddp_side, gyrostat_side
from turns import Side

VIRTUAL_WORKERS = 16
STEPS = 3
RSS_TARGET = Target(at_most=1.4)
BUFFERS_TARGET = Target(at_most=1.0)
WORKLOAD = "wide"


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the processes of one side needed together, in MB."""

    peak: float
    shared_once: float
    """Their proportional share when they had made their steps."""
    buffers: int = 0
    """Gradient buffers that the tree folded with."""


def measure(options: Options) -> Iterator[Figure]:
    runs: dict[str, list[Need]] = {"one": [], "tree": [], "ddp": [], "packed": []}
    for number in range(options.pairs):
        for name in runs if number % 2 == 0 else reversed(runs):
            runs[name].append(need(name))
        show_progress(number + 1, options.pairs, f"{runs['tree'][-1].peak:.0f} MB")
    one, tree, ddp, packed = runs.values()
    yield figure("tree order, N=16 against N=1: peak resident memory of the worker", tree, one, RSS_TARGET)
    yield Figure(
        name="tree order, N=16: gradient buffers for folding beyond the first, against log2 N",
        ours="counted",
        theirs="log2 N",
        unit="buffers",
        pairs=[Pair(found.buffers - 1, math.log2(VIRTUAL_WORKERS)) for found in tree],
        target=BUFFERS_TARGET,
    )
    yield figure("beside it the ddp order, N=16 against N=1", ddp, one)
    yield figure("beside it 16 DDP processes, resident memory added up, against N=1", packed, one)
    share = statistics.median(found.shared_once for found in packed)
    print(f"  (the 16 DDP processes with shared pages counted once: {share:.0f} MB)")


def figure(name: str, ours: list[Need], theirs: list[Need], target: Target | None = None) -> Figure:
    return Figure(
        name=name,
        ours="this",
        theirs="N=1",
        unit="MB",
        pairs=[Pair(a.peak, b.peak) for a, b in zip(ours, theirs, strict=True)],
        target=target,
    )


def need(name: str) -> Need:
    """Start new processes, for a high-water mark never falls, and let them make a few steps."""
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as directory:
        with side_named(name, Path(directory)) as side:
            side.run(STEPS)
            pids = side.pids()
            peak = sum(kilobytes(pid, "status", "VmHWM:") for pid in pids)
            shared_once = sum(kilobytes(pid, "smaps_rollup", "Pss:") for pid in pids)
            side.finish()
        report = Path(directory) / "gyrostat.buffers"
        buffers = int(report.read_text()) if report.exists() else 0
    return Need(peak=peak * 1024 / 1e6, shared_once=shared_once * 1024 / 1e6, buffers=buffers)


def side_named(name: str, directory: Path) -> Side:
    if name == "packed":
        return ddp_side(WORKLOAD, VIRTUAL_WORKERS, directory)
    if name == "one":
        return gyrostat_side(WORKLOAD, 1, 1, directory, reduction="tree")
    return gyrostat_side(WORKLOAD, VIRTUAL_WORKERS, 1, directory, reduction=name)


def kilobytes(pid: int, file: str, field: str) -> int:
    """A line of /proc, in kB of 1024 bytes."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise SystemExit(f"/proc/{pid}/{file} does not tell {field}")


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=5)

"""Bytes on the wire per step: the tree order on an aligned placement, against DDP's all-reduce on as many processes.

Counted by the kernel, not computed: the benchmark moves into a network namespace of its own, where the loopback device
carries the traffic of its processes and nothing else (TCP and IP headers and acknowledgements included, and gyrostat's
envelopes too). Workers of one machine would send next to nothing; here they behave as those of several machines do.
Eight virtual workers on 2 and on 4 workers; DDP accumulates, so that it also reduces once per step.
Needs `unshare` and `ip`, and the right to make a namespace.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Options, Target, main
from gyrostat.engine.environment import SHARED_MEMORY
from pairs import measure_pairs
from sides import ddp_side, gyrostat_side
from turns import Side
from workloads import EXAMPLES

VIRTUAL_WORKERS = 8
WORKERS = (2, 4)
TARGET = Target(at_most=1.05)
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first
STEPS_PER_TURN = 4
_ALONE = "GYROSTAT_BENCHMARK_ALONE"


def measure(options: Options) -> Iterator[Figure]:
    for workload in options.workloads:
        for workers in WORKERS:
            yield compare(workload, workers, options)


def compare(workload: str, workers: int, options: Options) -> Figure:
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        directory = Path(name)
        with (
            gyrostat_side(workload, VIRTUAL_WORKERS, workers, directory, reduction="tree") as ours,
            ddp_side(workload, workers, directory, micro_batches=VIRTUAL_WORKERS // workers) as theirs,
        ):
            for side in (ours, theirs):
                side.run(WARM_UP_STEPS)
            pairs = measure_pairs(
                lambda: kilobytes_per_step(ours), lambda: kilobytes_per_step(theirs), options.pairs
            )
            ours.finish()
            theirs.finish()
    return Figure(
        name=f"{workload}: sent per step by all {workers} workers, N={VIRTUAL_WORKERS}, tree order, against DDP",
        ours="gyrostat",
        theirs="DDP",
        unit="kB",
        pairs=pairs,
        target=TARGET,
    )


def kilobytes_per_step(side: Side) -> float:
    before = sent_over_loopback()
    side.run(STEPS_PER_TURN)
    return (sent_over_loopback() - before) / STEPS_PER_TURN / 1000


def sent_over_loopback() -> int:
    """All bytes that the loopback device of this network namespace has transmitted."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "lo":
            return int(counters.split()[8])
    raise SystemExit("there is no loopback device")


def move_into_own_network() -> None:
    """Start this program again in a network namespace of its own."""
    if _ALONE in os.environ:
        return
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        raise SystemExit("counting bytes needs the commands unshare and ip (Debian: util-linux, iproute2)")
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
    os.execve(unshare, [unshare, "--net", *as_root, *inside], {**os.environ, _ALONE: "1", SHARED_MEMORY: "0"})


if __name__ == "__main__":
    if not {"-h", "--help"} & set(sys.argv):
        move_into_own_network()
    main(__doc__ or "", measure, pairs=5, workloads=EXAMPLES)

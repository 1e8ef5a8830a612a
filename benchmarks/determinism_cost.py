"""What the levels of determinism cost: a step under `elastic` and under `heterogeneous`, against plain PyTorch.

The ResNet and the GPT example with one virtual worker on one thread, against the same training written by hand for plain
PyTorch, which pins nothing; two processes that take turns. For `heterogeneous` (AVX-512 and AVX2 in the pool) it also says what
`gyrostat scan` predicted for the example.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from figures import Figure, Options, Target, main
from pairs import Pair
from sides import HERE, ONE_THREAD
from turns import Side, take_turns
from workloads import EXAMPLES

LEVELS = {
    "elastic": (["--determinism", "elastic"], Target(at_most=1.01)),
    "heterogeneous": (["--determinism", "heterogeneous", "--pool", "avx512,avx2"], None),
}
GYROSTAT = str(Path(sys.executable).with_name("gyrostat"))


def measure(options: Options) -> Iterator[Figure]:
    for workload in options.workloads:
        for level, (arguments, target) in LEVELS.items():
            name = f"{workload}: a step under {level} against plain PyTorch"
            if level == "heterogeneous":
                name += f" (scan predicted {predicted(workload, quick=options.block_seconds < 1):.2f})"
            yield Figure(
                name=name,
                ours=level,
                theirs="PyTorch",
                unit="ms",
                pairs=compare(workload, arguments, options),
                target=target,
            )


def compare(workload: str, arguments: Sequence[str], options: Options) -> list[Pair]:
    """Milliseconds per step."""
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        directory = Path(name)
        with (
            gyrostat_side(workload, arguments, directory) as ours,
            plain_side(workload, directory) as theirs,
        ):
            turns = take_turns(ours, theirs, pairs=options.pairs, block_seconds=options.block_seconds)
    return [Pair(1000 / pair.ours, 1000 / pair.theirs) for pair in turns]


def gyrostat_side(workload: str, arguments: Sequence[str], directory: Path) -> Side:
    command = [GYROSTAT, "run", "--quiet", "--virtual-workers", "1", *arguments]
    command += [str(HERE / "side_gyrostat.py"), workload]
    return Side("gyrostat", [command], address=directory / "gyrostat.socket", processes=1, env=ONE_THREAD)


def plain_side(workload: str, directory: Path) -> Side:
    command = [sys.executable, str(HERE / "side_accumulation.py"), workload, "--micro-batches", "1"]
    return Side("PyTorch", [command], address=directory / "plain.socket", processes=1, env=ONE_THREAD)


def predicted(workload: str, *, quick: bool) -> float:
    """What `gyrostat scan` says about the example."""
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        answer = Path(name) / "answer.json"
        command = [GYROSTAT, "scan", "--json", str(answer), "--steps", "10" if quick else "100"]
        command += [str(HERE.parent / "examples" / f"{workload}.py")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(answer.read_text())["slowdown"])


if __name__ == "__main__":
    main(__doc__ or "", measure, workloads=EXAMPLES)

"""What every benchmark shares: its options, its figures against their targets, and how they are printed.

A benchmark is a function from `Options` to figures, handed to `main`. Missing a target is a finding and not an error: the
exit code says only whether the measurement itself is sound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gyrostat.core.plural import plural
from pairs import Estimate, Pair, estimate

REDUCTIONS = ("ddp", "tree")
_QUICK_PAIRS = 3


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a median ratio should reach, and optionally the near end of its interval."""

    at_least: float | None = None
    at_most: float | None = None
    low_at_least: float | None = None

    def reached(self, found: Estimate) -> bool:
        return (
            (self.at_least is None or found.median >= self.at_least)
            and (self.at_most is None or found.median <= self.at_most)
            and (self.low_at_least is None or found.low >= self.low_at_least)
        )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured ratio of ours to theirs."""

    name: str
    ours: str
    theirs: str
    unit: str
    pairs: Sequence[Pair]
    target: Target | None = None
    percent: bool = False
    """The ratio is a share, printed in percent."""

    @property
    def found(self) -> Estimate:
        return estimate([pair.ratio for pair in self.pairs])

    def lines(self) -> list[str]:
        """What a reader wants to know, in three lines."""
        ours = statistics.median(pair.ours for pair in self.pairs)
        theirs = statistics.median(pair.theirs for pair in self.pairs)
        found = self.found
        interval = f"{self._format(found.low)} to {self._format(found.high)}"
        lines = [
            f"{self.name}",
            f"  medians   {self.ours} {ours:.4g} {self.unit}, {self.theirs} {theirs:.4g} {self.unit}",
            f"  ratio     {self._format(found.median)}   {found.confidence:.0%} interval {interval}, "
            f"{plural(len(self.pairs), 'pair')}",
        ]
        if self.target is not None:
            lines.append(
                f"  target    {self._goal()}: {'reached' if self.target.reached(found) else 'NOT REACHED'}"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ours": self.ours,
            "theirs": self.theirs,
            "unit": self.unit,
            **asdict(self.found),
            "target": asdict(self.target) if self.target else None,
            "reached": self.target.reached(self.found) if self.target else None,
            "pairs": [[pair.ours, pair.theirs] for pair in self.pairs],
        }

    def _format(self, ratio: float) -> str:
        return f"{100 * ratio:.2f} %" if self.percent else f"{ratio:.3f}"

    def _goal(self) -> str:
        assert self.target is not None
        bounds = {
            "at least ": self.target.at_least,
            "at most ": self.target.at_most,
            "interval from at least ": self.target.low_at_least,
        }
        return ", ".join(words + self._format(value) for words, value in bounds.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of all benchmarks."""

    pairs: int
    block_seconds: float
    """How long one side works before the other has its turn, where sides take turns in blocks of steps."""
    workloads: tuple[str, ...]
    reductions: tuple[str, ...]
    """In which orders gyrostat adds gradients."""
    quick: bool = False
    """Only to see that it works."""


def main(
    description: str,
    measure: Callable[[Options], Iterable[Figure]],
    *,
    pairs: int = 20,
    workloads: Sequence[str] = (),
    reductions: Sequence[str] = (),
) -> None:
    """The command line of one benchmark, which by default measures `pairs` pairs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=int, default=pairs, help=f"how many times both sides are measured (default {pairs})"
    )
    parser.add_argument("--quick", action="store_true", help="a few short pairs, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    if workloads:
        parser.add_argument(
            "--block", type=float, default=1.5, metavar="S", help="seconds per turn (default 1.5)"
        )
        parser.add_argument("--workload", choices=workloads, help="only this one")
    if reductions:
        parser.add_argument("--reduction", choices=reductions, help="only this order")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {args.pairs}")
    workload, reduction = getattr(args, "workload", None), getattr(args, "reduction", None)
    options = Options(
        pairs=min(args.pairs, _QUICK_PAIRS) if args.quick else args.pairs,
        block_seconds=0.3 if args.quick else getattr(args, "block", 0.0),
        workloads=(workload,) if workload else tuple(workloads),
        reductions=(reduction,) if reduction else tuple(reductions),
        quick=args.quick,
    )
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: others use this machine (load average {load:.1f}); expect wide intervals")
    figures = []
    for figure in measure(options):
        figures.append(figure)
        print("\n".join(figure.lines()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(_report(description, figures, load), indent=1) + "\n")


def _report(description: str, figures: Sequence[Figure], load: float) -> dict[str, Any]:
    import torch

    return {
        "benchmark": description.splitlines()[0],
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "load_before": load},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "figures": [figure.to_json() for figure in figures],
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()

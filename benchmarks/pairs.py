"""Two sides measured in pairs, and what may be said about their ratio.

On a machine that others use too, speed drifts by far more than the differences of interest. So the two sides are never
measured one after the other but in pairs, a moment apart, in alternating order; each pair gives one ratio, and the
figure is the median ratio. Its interval comes from order statistics: between the l-th smallest and the l-th largest of n
ratios lies the true median with a probability that is a plain sum of binomial coefficients, whatever the noise looks
like. `figures.py` compares a figure with its target and prints it.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """What the two sides measured a moment apart, in one unit."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


@dataclass(frozen=True)
class Estimate:
    """A median, and an interval that holds the true one with probability `confidence`."""

    median: float
    low: float
    high: float
    confidence: float


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The median with its narrowest exact interval of at least `confidence`; with fewer than 6 values, their range."""
    if not values:
        raise ValueError("no values to take a median of")
    ordered = sorted(values)
    cut = 0
    while cut + 1 < (len(ordered) + 1) // 2 and coverage(len(ordered), cut + 1) >= confidence:
        cut += 1
    return Estimate(statistics.median(ordered), ordered[cut], ordered[-1 - cut], coverage(len(ordered), cut))


def coverage(count: int, cut: int) -> float:
    """How probably the median lies within what is left of `count` values without the `cut` smallest and largest."""
    tail = sum(math.comb(count, below) for below in range(cut + 1))
    return 1.0 - 2 * tail / (1 << count)


def measure_pairs(ours: Callable[[], float], theirs: Callable[[], float], pairs: int) -> list[Pair]:
    """Call both sides `pairs` times; who begins alternates."""
    measured = []
    for number in range(pairs):
        if number % 2 == 0:
            mine = ours()
            other = theirs()
        else:
            other = theirs()
            mine = ours()
        measured.append(Pair(mine, other))
        show_progress(number + 1, pairs, f"{mine:.4g} against {other:.4g}")
    return measured


def show_progress(done: int, total: int, what: str) -> None:
    """One line on a terminal, written over and over; nothing anywhere else."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r\033[K  pair {done} of {total}: {what}", end=end, file=sys.stderr, flush=True)

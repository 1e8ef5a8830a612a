"""The result of an experiment, as values for the page and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gyrostat.core.errors import UsageError


@dataclass(frozen=True)
class Compared:
    """One figure: the paper's, ours, and whether ours reaches its target."""

    figure: str
    paper: str
    ours: str
    reached: bool | None = None
    """None: the paper gives it, but nothing is asked of it."""


@dataclass(frozen=True)
class TextTable:
    """Rows under a heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Series:
    """A line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    """The value holds until the next point."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines over one axis; with `bars` the series' values side by side for each label instead."""

    name: str
    """Of its file."""
    title: str
    x: str
    y: str
    series: Sequence[Series]
    bars: Sequence[str] = ()
    """Labels of groups; a series then has one point for each."""
    log_x: bool = False


@dataclass(frozen=True, kw_only=True)
class ExperimentFinding:
    """The result of one experiment."""

    name: str
    title: str
    setup: str
    """What was simulated, and every choice that the paper leaves open."""
    compared: Sequence[Compared]
    differs: str = ""
    """Why ours differs where it does."""
    tables: Sequence[TextTable] = ()
    plots: Sequence[Plot] = ()


@dataclass(frozen=True, kw_only=True)
class ExperimentContext:
    """The inputs of an experiment."""

    data: Path
    """The directory of traces and tables."""
    progress: Callable[[str], None] = field(default=lambda text: None)
    """Told what is going on."""

    def file(self, name: str) -> Path:
        path = self.data / name
        if not path.exists():
            raise UsageError(
                f"{path} is not there: this experiment needs it; give its directory with --data DIR"
            )
        return path


def less(before: float, after: float) -> float:
    """By how many percent `after` is less."""
    return 100 * (1 - after / before) if before else 0.0


def percent(value: float) -> str:
    return f"{value:.1f} %"


def seconds(value: float) -> str:
    return f"{value:,.0f} s"

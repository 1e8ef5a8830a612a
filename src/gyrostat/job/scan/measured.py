"""What the scanner tells a worker, and what comes back. Without torch, which the scanner does not need."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gyrostat.job.processes.protocol import Program


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and which of its steps to measure."""

    program: Program
    directory: str
    """Where the pipes for taking turns are, and results are written."""
    level: str
    other: str
    """The level of the worker with which to take turns."""
    warm_up: int
    timed: int
    profiled: int

    @property
    def result(self) -> Path:
        return Path(self.directory) / f"{self.level}.json"

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed + self.profiled


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one run gave. All times are seconds."""

    cpu_type: str | None
    turns: list[float]
    """What a step took on average in each turn: computing time of the main thread, so that waiting does not count."""
    operators: dict[str, float]
    """Of a typical step, by operator: their own time."""
    modules: dict[str, float]
    """The same by module, backward included."""

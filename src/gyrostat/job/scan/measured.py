"""The orders of the scanner to a worker, and the results. Imports no torch, which the scanner does not need."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gyrostat.job.processes.protocol import Program


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The program, and the steps to measure."""

    program: Program
    directory: str
    """The directory of the pipes and results."""
    level: str
    other: str
    """The level of the other worker."""
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
    """The measurements of one run. All times are seconds."""

    cpu_type: str | None
    turns: list[float]
    """The mean time of a step in each turn: CPU time of the main thread, so waiting does not count."""
    operators: dict[str, float]
    """Self time in a median step, by operator."""
    modules: dict[str, float]
    """The same by module, backward included."""

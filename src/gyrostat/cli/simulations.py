"""Simulations of `simulate` and `replay`, and the tables that they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from gyrostat.sched.port import Change
    from gyrostat.sched.throughput import Throughput
    from gyrostat.sim.cluster import Costs
    from gyrostat.sim.job import TraceJob
    from gyrostat.sim.report import ReportedRun
    from gyrostat.sim.setup import Setup
    from gyrostat.sim.simulate import SimulationResult


def run_setup(
    setup: Setup,
    jobs: list[TraceJob],
    truth: Throughput | None,
    costs: Costs,
    changes: Callable[[], list[Iterator[tuple[float, Change]]]],
    name: str,
    record: Path | None = None,
) -> SimulationResult:
    """One simulation with a progress bar; `record` saves every observation and decision of the scheduler."""
    from gyrostat.sched.recording import TickRecorder
    from gyrostat.sim.setup import for_setup
    from gyrostat.sim.simulate import simulate as run

    fleet, vcs, placer = setup.parts()
    recorder = nullcontext() if record is None else TickRecorder(record, setup.to_json())
    with recorder as keep, _progress(name, len(jobs)) as progress:
        return run(
            fleet,
            vcs,
            placer,
            for_setup(setup, jobs),
            throughput=setup.throughput,
            truth=truth,
            costs=costs,
            changes=changes(),
            progress=progress,
            watchers=() if keep is None else (keep,),
        )


@contextmanager
def _progress(name: str, jobs: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=jobs)
        yield lambda done: bar.update(task, completed=done)


def print_runs(console: Console, runs: list[ReportedRun]) -> None:
    from gyrostat.sim.report import table, tenant_table

    head, rows = table(runs)
    figures = Table(*head, box=None)
    for row in rows:
        figures.add_row(*row)
    console.print(figures)
    if any(len(run.summary.tenants) > 1 for run in runs):
        head, rows = tenant_table(runs)
        console.print("\nmean queueing by tenant (! longer than in a private cluster)")
        tenants = Table(*head, box=None)
        for row in rows:
            tenants.add_row(*row)
        console.print(tenants)

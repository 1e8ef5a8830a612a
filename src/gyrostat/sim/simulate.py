"""One simulation: a fleet, VCs with their policies, a placer and jobs in; records out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from gyrostat.core.devices import Fleet
from gyrostat.core.plan import Plan
from gyrostat.sched import loop
from gyrostat.sched.placers.base import Placer
from gyrostat.sched.port import Change, Snapshot
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tenant_state import Vc
from gyrostat.sched.throughput import Throughput
from gyrostat.sim.cluster import Costs, SimCluster
from gyrostat.sim.job import TraceJob
from gyrostat.sim.records import Records


@dataclass(frozen=True)
class SimulationResult:
    """The outcome of a simulation."""

    records: Records
    events: int
    """Arrivals, completions and other events."""
    ticks: int
    unfinished: tuple[str, ...]
    """Jobs that had not finished: too large for the devices that they may use, or active at the horizon."""


def simulate(
    fleet: Fleet,
    vcs: Sequence[Vc],
    placer: Placer,
    jobs: Iterable[TraceJob],
    *,
    throughput: Throughput | None = None,
    truth: Throughput | None = None,
    costs: Costs | None = None,
    changes: Iterable[Iterator[tuple[float, Change]]] = (),
    horizon: float | None = None,
    watchers: tuple[loop.Watcher, ...] = (),
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """`throughput` is what the scheduler expects at first; `truth`, by default the same, is the actual throughput.
    `progress` is called now and then with the number of finished jobs.
    """
    arriving = iter(jobs)
    first = next(arriving, None)
    began = 0.0 if first is None else first.request.submitted
    records = Records(fleet, began)
    cluster = SimCluster(
        fleet,
        arriving if first is None else chain([first], arriving),
        recorder=records,
        throughput=throughput if truth is None else truth,
        costs=costs,
        changes=changes,
        horizon=horizon,
    )
    ticks = 0

    def watch(snapshot: Snapshot, plan: Plan) -> None:
        nonlocal ticks
        ticks += 1
        if progress is not None and ticks % 4096 == 0:
            progress(len(records))

    scheduler_state = SchedulerState(fleet, vcs, placer, throughput)
    loop.run(cluster, scheduler_state, watchers=(watch, *watchers))
    records.close(cluster.clock.now())
    if progress is not None:
        progress(len(records))
    return SimulationResult(records, cluster.events, ticks, tuple(cluster.active))

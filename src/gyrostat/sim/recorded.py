"""A recording of a cluster as a trace: its jobs, for a simulation with another policy.

The duration of a job comes from its devices over time, at the throughput that the scheduler expected. Jobs that had not
finished at the end of the recording are left out; node failures and serving loads are part of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gyrostat.core.devices import Devices, Fleet
from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Preempt, Resize, Start
from gyrostat.core.request import JobId, JobRequest
from gyrostat.sched.port import Bound, Change, Finished, NodeBack, NodeLost, Stopped, Submitted, Withdrawn
from gyrostat.sched.recording import read_recording
from gyrostat.sched.throughput import Throughput
from gyrostat.sim.job import TraceJob
from gyrostat.sim.setup import Setup, read_setup


@dataclass(frozen=True)
class RecordedCluster:
    """The contents of a recording."""

    setup: Setup
    jobs: list[TraceJob]
    """In order of submission."""
    changes: list[tuple[float, Change]]
    unfinished: int


@dataclass
class _Job:
    request: JobRequest
    """As first submitted: the owner may have changed the number of devices, or paused the job, later."""
    over: bool = False
    devices: Devices = ()
    since: float = 0.0
    work: float = field(default=0.0)
    """Seconds that it would have taken on the devices that it requests."""

    def hold(self, devices: Devices, now: float, fleet: Fleet, throughput: Throughput) -> None:
        if self.devices:
            self.work += (now - self.since) * throughput.rate(self.request, fleet.count(self.devices))
        self.devices, self.since = devices, now


def read_recorded(path: Path) -> RecordedCluster:
    given, ticks = read_recording(path)
    setup = read_setup(given)
    fleet = setup.parts()[0]
    jobs: dict[JobId, _Job] = {}
    changes: list[tuple[float, Change]] = []

    def hold(id_: JobId, devices: Devices, now: float) -> None:
        jobs[id_].hold(devices, now, fleet, setup.throughput)

    try:
        for snapshot, plan in ticks:
            for change in snapshot.changes:
                _note(change, snapshot.now, jobs, changes, hold)
            for action in plan.actions:
                match action:
                    case Start() | Resize():
                        hold(action.job, action.devices, snapshot.now)
                    case Preempt():
                        hold(action.job, (), snapshot.now)
    except KeyError as error:
        raise UsageError(f"{path} has changes of job {error} before its submission") from error
    finished = [TraceJob(job.request, job.work) for job in jobs.values() if job.over and job.work > 0]
    return RecordedCluster(setup, finished, changes, len(jobs) - len(finished))


def _note(
    change: Change,
    now: float,
    jobs: dict[JobId, _Job],
    changes: list[tuple[float, Change]],
    hold: Callable[[JobId, Devices, float], None],
) -> None:
    match change:
        case Submitted(request=request):
            jobs.setdefault(request.id, _Job(request)).over = False
        case Bound():
            hold(change.job, change.devices, now)
        case Finished():
            hold(change.job, (), now)
            jobs[change.job].over = True
        case Stopped():
            hold(change.job, (), now)
        case NodeLost() | NodeBack() | Withdrawn():
            changes.append((now, change))

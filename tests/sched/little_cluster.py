"""A cluster without a clock of its own, for tests of ticks: changes in, plans out."""

from __future__ import annotations

from collections.abc import Sequence

from gyrostat.core.devices import Fleet
from gyrostat.core.plan import Action, Plan
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.placers.base import Placer
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.planner.history import Observation
from gyrostat.sched.policies import find_policy
from gyrostat.sched.port import Change, Finished, Snapshot, Submitted
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tenant_state import Vc
from gyrostat.sched.throughput import Throughput
from gyrostat.sched.tick import tick


def request(
    name: str,
    devices: int,
    *,
    at: float = 0.0,
    vc: str = "all",
    soft: bool = False,
    smallest: int | None = None,
    largest: int | None = None,
    types: tuple[str, ...] = (),
    mixes: bool = False,
    priority: int = 0,
    work: float | None = None,
) -> JobRequest:
    return JobRequest(
        id=JobId(name),
        vc=vc,
        submitted=at,
        devices=devices,
        min_devices=smallest,
        max_devices=largest,
        types=types,
        mixes_types=mixes,
        affinity=Affinity.SOFT if soft else Affinity.HARD,
        priority=priority,
        work=work,
    )


class LittleCluster:
    """Ticks on demand."""

    def __init__(
        self,
        fleet: str,
        policy: str = "fifo",
        *,
        quotas: dict[str, int] | dict[str, dict[str, int]] | None = None,
        lends: bool = False,
        placer: Placer | None = None,
        throughput: Throughput | None = None,
        history: Sequence[Observation] = (),
    ) -> None:
        self.fleet = Fleet.parse(fleet)
        by_type = None
        if quotas is not None:
            first = next(iter(self.fleet.totals))
            by_type = {vc: each if isinstance(each, dict) else {first: each} for vc, each in quotas.items()}
        self.placer = NodePlacer(self.fleet, quotas=by_type, lends=lends) if placer is None else placer
        names = list(quotas or {"all": 0})
        self.scheduler_state = SchedulerState(
            self.fleet,
            [Vc(name=name, policy=find_policy(policy)) for name in names],
            self.placer,
            throughput,
            history,
        )

    def tick(self, now: float, *changes: Change) -> Plan:
        return tick(self.scheduler_state, Snapshot(now, changes))

    def submit(self, now: float, *requests: JobRequest) -> tuple[Action, ...]:
        return self.tick(now, *(Submitted(one) for one in requests)).actions

    def finish(self, now: float, *jobs: str) -> tuple[Action, ...]:
        return self.tick(now, *(Finished(JobId(job)) for job in jobs)).actions

    def counts(self) -> dict[str, dict[str, int]]:
        """How many devices of which type every running job has."""
        return {str(job.id): job.all_counts() for job in self.scheduler_state.jobs.values() if job.running}

    def held(self) -> dict[str, tuple[int, ...]]:
        """Devices by running job, own and borrowed ones."""
        return {
            str(job.id): tuple(sorted((*job.devices, *job.borrowed)))
            for job in self.scheduler_state.jobs.values()
            if job.running
        }


def yielding_job(
    name: str, virtual_workers: int, *, workload: str, mixes: bool, at: float = 0.0, vc: str = "all"
) -> JobRequest:
    """A job that may be shrunk to nothing, wherever its devices are, and is known by its profile."""
    return JobRequest(
        id=JobId(name),
        vc=vc,
        submitted=at,
        devices=virtual_workers,
        min_devices=0,
        virtual_workers=virtual_workers,
        mixes_types=mixes,
        affinity=Affinity.SOFT,
        workload=f"{workload} (batch size 1)",
    )

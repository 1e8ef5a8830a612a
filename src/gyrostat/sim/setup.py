"""The setup of a simulation as text: cluster, way of sharing, policies, costs. Recordings contain it.

The cluster is one of
- a cell file (see docs/reference/cells.md),
- `v100:73x8,p100:2x4`: nodes of one pool; all jobs share it as one VC, whatever tenants the trace names,
- `by-load:73`: 73 machines with 8 devices, divided among the trace's tenants by the load of their jobs (`by_load`).

A policy is `NAME[:SETTING=VALUE,…]`, and may differ by VC: `fifo;prod=tiresias:queues=500/10000`.

File format: the first line of a recording contains the fields of `Setup`. Do not rename them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gyrostat.core.devices import Counts, Fleet
from gyrostat.core.errors import UsageError
from gyrostat.core.files import read_text
from gyrostat.core.request import JobRequest
from gyrostat.sched.cells.load import loads
from gyrostat.sched.cells.spec import CellSpec
from gyrostat.sched.placers.base import Placer
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.planner.companion import Companion
from gyrostat.sched.planner.history import Observation
from gyrostat.sched.planner.learned import LearnedThroughput
from gyrostat.sched.planner.tables import profiles_of
from gyrostat.sched.planner.throughput import PlannedThroughput
from gyrostat.sched.policies.by_vc import vcs_by_policy
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tenant_state import Vc
from gyrostat.sched.throughput import AnalyticScaling, Throughput
from gyrostat.sim.job import TraceJob
from gyrostat.sim.sharing import Sharing, build, cluster_of_nodes
from gyrostat.sim.traces import DEFAULT_VC


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All inputs of a scheduler, as plain values."""

    cluster: str
    """The text of a cell file, or nodes as above."""
    sharing: str
    policy: str
    lends: bool = True
    overhead: float = 0.0
    """The overhead of `AnalyticScaling`."""
    nodes: Mapping[str, int] | None = None
    """With `by-load`: machines of each tenant."""
    profiles: str | None = None
    """The text of a JSON file of measured throughputs (see docs/howto/plan.md), for jobs that name their workload."""
    speeds: Mapping[str, float] | None = None
    """Of a live cluster: the speed of device types relative to each other; throughput is learned from measurements."""
    history: Sequence[Mapping[str, Any]] = ()
    """With `speeds`: what jobs had measured before (`planner.history.Observation`)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "sharing": self.sharing,
            "policy": self.policy,
            "lends": self.lends,
            "overhead": self.overhead,
            "nodes": None if self.nodes is None else dict(self.nodes),
            "profiles": self.profiles,
            "speeds": None if self.speeds is None else dict(self.speeds),
            "history": [dict(each) for each in self.history],
        }

    @cached_property
    def throughput(self) -> Throughput:
        if self.speeds is not None:
            return LearnedThroughput(self.speeds)
        return throughput_of(self.profiles, self.overhead)

    def parts(self) -> tuple[Fleet, list[Vc], Placer]:
        """A new fleet, VCs and placer."""
        spec = self.spec()
        if spec is None:
            fleet = Fleet.parse(self.cluster)
            return fleet, vcs_by_policy([DEFAULT_VC], {}, self.policy), NodePlacer(fleet)
        sharing = Sharing(self.sharing)
        fleet, placer = build(spec, sharing, lends=self.lends)
        if sharing is Sharing.FLAT:
            return fleet, vcs_by_policy([DEFAULT_VC], {}, self.policy), placer
        weights = {vc.name: vc.weight for vc in spec.virtual_clusters}
        return fleet, vcs_by_policy(list(weights), weights, self.policy, spec.servers), placer

    def scheduler_state(self) -> SchedulerState:
        fleet, vcs, placer = self.parts()
        history = [Observation(**each) for each in self.history]
        return SchedulerState(fleet, vcs, placer, self.throughput, history)

    def spec(self) -> CellSpec | None:
        """The cells of the cluster; None for one pool of nodes."""
        if self.nodes is not None:
            return cluster_of_nodes(self.nodes)
        if "\n" not in self.cluster:
            return None
        return loads(self.cluster, "the cluster")

    @property
    def one_vc(self) -> bool:
        """Whether all jobs go to one VC."""
        return self.spec() is None or self.sharing == Sharing.FLAT


def throughput_of(profiles: str | None, overhead: float) -> Throughput:
    """From the text of a file of profiles for jobs that name their workload; analytic for others."""
    analytic = AnalyticScaling(overhead=overhead)
    return analytic if profiles is None else _Measured(profiles, analytic)


class _Measured:
    """Profiles for jobs that name their workload, analytic for others."""

    def __init__(self, profiles: str, otherwise: Throughput) -> None:
        try:
            document = json.loads(profiles)
        except ValueError as error:
            raise UsageError(f"the file of throughputs is not JSON: {error}") from error
        self._planned = PlannedThroughput(profiles_of(document))
        self._otherwise = otherwise

    def rate(self, request: JobRequest, counts: Counts) -> float:
        return (self._otherwise if request.workload is None else self._planned).rate(request, counts)

    def companion(self, request: JobRequest) -> Companion | None:
        return (self._otherwise if request.workload is None else self._planned).companion(request)


def read_setup(data: Mapping[str, Any]) -> Setup:
    """The setup in a recording."""
    try:
        return Setup(**{**data, "history": tuple(data.get("history", ()))})
    except TypeError as error:
        raise UsageError(f"this version does not write such a setup: {error}") from error


def read_cluster(text: str, jobs: Sequence[TraceJob]) -> tuple[str, Mapping[str, int] | None]:
    """The value of `--cluster`: the text for a setup, and machines by tenant."""
    kind, _, number = text.partition(":")
    if kind == "by-load":
        if not number.isdigit() or not int(number):
            raise UsageError(f"a cluster by load is written by-load:NODES, such as by-load:73; got {text!r}")
        return text, by_load(jobs, int(number))
    path = Path(text)
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return read_text(path) + "\n", None
    Fleet.parse(text)
    return text, None


def by_load(jobs: Iterable[TraceJob], nodes: int, size: int = 8) -> dict[str, int]:
    """Machines for each tenant: enough for its largest job, then one by one to the tenant farthest below its share of the
    load.
    """
    load: dict[str, float] = {}
    least: dict[str, int] = {}
    for job in jobs:
        vc, devices = job.request.vc, job.request.devices
        load[vc] = load.get(vc, 0.0) + devices * job.duration
        least[vc] = max(least.get(vc, 1), -(-devices // size))
    given = dict(sorted(least.items()))
    if sum(given.values()) > nodes:
        raise UsageError(
            f"{nodes} nodes are too few: the largest jobs of the {len(given)} tenants need {sum(given.values())} at least"
        )
    whole = sum(load.values())
    for _ in range(nodes - sum(given.values())):
        neediest = max(given, key=lambda vc: nodes * load[vc] / whole - given[vc])
        given[neediest] += 1
    return given


def for_setup(setup: Setup, jobs: Sequence[TraceJob]) -> list[TraceJob]:
    """The jobs as this setup runs them: all in one VC if there is only one."""
    if not setup.one_vc:
        return list(jobs)
    return [
        job
        if job.request.vc == DEFAULT_VC
        else TraceJob(replace(job.request, vc=DEFAULT_VC), job.duration, job.request.vc)
        for job in jobs
    ]

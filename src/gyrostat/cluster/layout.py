"""The devices of a cluster, the cells and tenants that they are divided into, and what a job may have of them.

A layout is described by a cell file (docs/reference/cells.md). Every virtual cluster (VC) has its cells, and beside it a
companion VC without cells for its opportunistic jobs, which use what no other job uses. Recordings contain the text; `sim`
reads it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import DeviceRecord
from gyrostat.core.devices import DeviceId, Fleet
from gyrostat.core.errors import Unplaceable, UsageError
from gyrostat.core.plural import plural
from gyrostat.core.request import JobId, JobRequest
from gyrostat.job.control.device_assignment import Slot
from gyrostat.sched.cells.file import DeviceTypeEntry, read
from gyrostat.sched.cells.load import parse
from gyrostat.sched.cells.spec import CellSpec
from gyrostat.sched.placers.base import PlacementRefused
from gyrostat.sched.placers.cells import CellPlacer, fleet_of
from gyrostat.sched.planner.history import Observation
from gyrostat.sched.planner.learned import LearnedThroughput
from gyrostat.sched.planner.throughput import is_workload, workload_name
from gyrostat.sched.policies.by_vc import vcs_by_policy
from gyrostat.sched.state import SchedulerState

_COMPANION = ".opportunistic"


@dataclass(frozen=True)
class DeviceSize:
    """What a worker on a device may use."""

    cpus: float
    memory: float
    """Bytes."""


UNLIMITED = DeviceSize(math.inf, math.inf)


@dataclass(frozen=True)
class ClusterLayout:
    """A cluster as its jobs see it."""

    text: str
    """The cell file, with companion VCs."""
    spec: CellSpec
    fleet: Fleet
    types: Mapping[str, DeviceTypeEntry]
    """Attributes of a device type, where the file states them."""
    env: Mapping[DeviceId, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables of a worker on a device."""
    size: DeviceSize = UNLIMITED
    """Of a device whose type states none."""

    @property
    def virtual_clusters(self) -> list[str]:
        """Without companion VCs."""
        return [vc.name for vc in self.spec.virtual_clusters if not vc.name.endswith(_COMPANION)]

    def slot(self, device: DeviceId) -> Slot:
        entry = self._entry(self.fleet.type_of(device))
        return Slot(device=device, paced=entry.pace, env=self.env.get(device, {}))

    def record(self, device: DeviceId) -> DeviceRecord:
        node = self.fleet.nodes[self.fleet.node_of[device]]
        entry = self._entry(node.type)
        return DeviceRecord(
            id=device,
            name=f"{node.name}/{device - node.first}",
            type=node.type,
            node=node.name,
            cell=self._cell(node.name),
            pace=entry.pace,
            cpus=entry.cpus,
            memory=entry.memory,
        )

    # The scheduler.

    @property
    def speeds(self) -> dict[str, float]:
        """Of device types, relative to each other: the declared paces; equal if one has none."""
        paces = {type_: self._entry(type_).pace for type_ in self.fleet.totals}
        if None in paces.values():
            return dict.fromkeys(paces, 1.0)
        return {type_: pace or 1.0 for type_, pace in paces.items()}

    def setup(self, policy: str, history: Sequence[Observation] = ()) -> dict[str, Any]:
        """For a recording (`sched.recording`)."""
        return {
            "cluster": self.text,
            "sharing": "cells",
            "policy": policy,
            "lends": True,
            "overhead": 0.0,
            "nodes": None,
            "profiles": None,
            "speeds": self.speeds,
            "history": [asdict(each) for each in history],
        }

    def scheduler_state(self, policy: str, history: Sequence[Observation] = ()) -> SchedulerState:
        """`history`: what jobs have measured so far."""
        placer = CellPlacer(self.spec, lends=True)
        weights = {vc.name: vc.weight for vc in self.spec.virtual_clusters}
        vcs = vcs_by_policy(list(weights), weights, policy, self.spec.servers)
        return SchedulerState(placer.fleet, vcs, placer, LearnedThroughput(self.speeds), history)

    def request(self, id_: str, spec: JobSpec, vc: str, submitted: float) -> JobRequest:
        """The job as the scheduler sees it. Raises `Unplaceable` if this cluster can never run it."""
        types = self._usable(spec)
        placer = CellPlacer(self.spec, lends=True)
        counts = self.fleet.totals if spec.opportunistic else placer.capacity(vc)
        whole = sum if spec.mix_types else max
        room = whole([counts.get(type_, 0) for type_ in types or self.fleet.totals] or [0])
        if spec.min > room:
            whose = "the whole cluster" if spec.opportunistic else f"virtual cluster {vc!r}"
            available = ", ".join(f"{number} {type_}" for type_, number in counts.items()) or "no devices"
            among = "" if not types else f" among {', '.join(types)}"
            once = "" if spec.mix_types or len(counts) < 2 else ", of which it may use one type at a time"
            raise Unplaceable(
                f"the job needs at least {plural(spec.min, 'device')}{among}, and {whose} has {available}{once}; "
                "ask for fewer: --min"
            )
        self._check_servers(spec, vc)
        largest = min(spec.largest, room)
        request = JobRequest(
            id=JobId(id_),
            vc=f"{vc}{_COMPANION}" if spec.opportunistic else vc,
            submitted=submitted,
            devices=spec.min if spec.opportunistic else largest,
            min_devices=spec.min,
            max_devices=largest,
            types=types,
            mixes_types=spec.mix_types,
            virtual_workers=spec.virtual_workers if spec.server_role is None else spec.largest,
            priority=spec.priority,
            workload=_workload(spec),
            work=None if spec.steps is None else float(spec.steps),
            servers=None if spec.server_role is None else spec.server_role.needs,
        )
        self._check_alone(request, placer, types or tuple(counts))
        return request

    def _check_servers(self, spec: JobSpec, vc: str) -> None:
        """Raise `Unplaceable` if its virtual cluster can never run the job's parameter servers."""
        if (role := spec.server_role) is None:
            return
        if spec.opportunistic:
            raise Unplaceable(
                "a job with parameter servers is not opportunistic: servers run on cores that its virtual cluster owns"
            )
        capacity = self.spec.servers[vc]
        if not role.needs.fits(capacity):
            raise Unplaceable(
                f"the job's {role.count} servers need {role.needs}, and virtual cluster {vc!r} has {capacity} for parameter "
                "servers; ask for fewer: --servers, --server-cores, --server-memory"
            )

    def _check_alone(self, request: JobRequest, placer: CellPlacer, types: Sequence[str]) -> None:
        """Raise `Unplaceable` unless it fits on an empty cluster."""
        if request.mixes_types:
            return
        borrowed = request.vc.endswith(_COMPANION)
        refusals = []
        for type_ in types:
            answer = placer.place(request, {type_: max(1, request.smallest)}, borrowed)
            if not isinstance(answer, PlacementRefused):
                return
            refusals.append(answer.reason)
        raise Unplaceable(f"no cell of {request.vc} can hold it: {'; '.join(refusals) or 'there are none'}")

    def _usable(self, spec: JobSpec) -> tuple[str, ...]:
        """The device types that the job may use and that are large enough; empty: all."""
        unknown = [type_ for type_ in spec.types if type_ not in self.fleet.totals]
        wanted = spec.types or tuple(self.fleet.totals)
        if unknown and len(unknown) == len(spec.types):
            raise Unplaceable(
                f"there are no devices of type {', '.join(unknown)} here; there are {', '.join(self.fleet.totals)}"
            )
        sizes = {type_: self._size(type_) for type_ in wanted if type_ in self.fleet.totals}
        found = [
            type_
            for type_, size in sizes.items()
            if (spec.cpu or 0) <= size.cpus and (spec.memory or 0) <= size.memory
        ]
        if not found:
            found_sizes = "; ".join(
                f"{type_}: {size.cpus:g} CPUs, {size.memory} bytes" for type_, size in sizes.items()
            )
            raise Unplaceable(
                f"no device has {spec.cpu or 0:g} CPUs and {spec.memory or 0} bytes of memory for a worker of the job "
                f"({found_sizes}); ask for less: --cpu, --memory"
            )
        return tuple(found) if spec.types or len(found) < len(self.fleet.totals) else ()

    def _size(self, type_: str) -> DeviceSize:
        entry = self._entry(type_)
        return DeviceSize(entry.cpus or self.size.cpus, entry.memory or self.size.memory)

    def _entry(self, type_: str) -> DeviceTypeEntry:
        return self.types.get(type_, DeviceTypeEntry())

    def _cell(self, node: str) -> str:
        for hierarchy in self.spec.hierarchies:
            nodes = self.spec.layouts[hierarchy.name].nodes
            if node in nodes:
                size = hierarchy.nodes_in(len(hierarchy.types) - 1)
                return f"{hierarchy.name}-{nodes.index(node) // size}"
        return node


def _workload(spec: JobSpec) -> str:
    """What it trains, for the history of measurements: as its owner names it, or its script."""
    name = spec.workload or spec.script
    return name if is_workload(name) else workload_name(name, 1)


def read_layout(
    text: str, env: Mapping[DeviceId, Mapping[str, str]] | None = None, size: DeviceSize = UNLIMITED
) -> ClusterLayout:
    """The layout that a cell file describes."""
    file, _, problems = read(text)
    if file is None or problems:
        raise unsound(problems)
    document = yaml.safe_load(text)
    tenants = document["virtual_clusters"]
    for name in [name for name in tenants if not name.endswith(_COMPANION)]:
        tenants.setdefault(f"{name}{_COMPANION}", {"weight": file.virtual_clusters[name].weight})
    whole = yaml.safe_dump(document, sort_keys=False)
    spec, problems = parse(whole)
    if spec is None:
        raise unsound(problems)
    return ClusterLayout(whole, spec, fleet_of(spec), file.device_types, env or {}, size)


def unsound(problems: Sequence[object], where: str = "") -> UsageError:
    return UsageError(
        "the cluster is no sound cell file:\n" + "\n".join(f"  {where}{each}" for each in problems)
    )

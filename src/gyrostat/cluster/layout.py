"""What this machine offers to jobs: its devices, the cells and tenants that they are divided into, and what each slot means.

Three ways to say so: `cpu:4` or `fast:2@400,slow:2@100` (types of slots, so many of each, perhaps paced at so many samples per
second), a cell file (docs/cells.md) whose machines are parts of this one, or nothing, and what is there is found. All
become a cell file, for there is one way to share: every VC has its cells, and besides it a twin without any for its
opportunistic jobs, which live on what nobody uses. The text is kept with every recording; `sim` reads it, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from gyrostat.cluster.records import DeviceRecord, JobSpec
from gyrostat.core.devices import DeviceId, Fleet
from gyrostat.core.errors import Unplaceable, UsageError
from gyrostat.core.request import JobId, JobRequest
from gyrostat.job.control.device_assignment import Slot
from gyrostat.sched.cells.file import DeviceTypeEntry, read
from gyrostat.sched.cells.spec import CellSpec, parse
from gyrostat.sched.placers.base import PlacementRefused
from gyrostat.sched.placers.cells import CellPlacer, fleet_of
from gyrostat.sched.policies.by_vc import vcs_by_policy
from gyrostat.sched.state import SchedulerState

_TWIN = ".opportunistic"


@dataclass(frozen=True)
class DeviceSize:
    """What a worker on a device may use."""

    cpus: float
    memory: float
    """Bytes."""


UNLIMITED = DeviceSize(math.inf, math.inf)


@dataclass(frozen=True)
class ClusterLayout:
    """A machine as its jobs see it."""

    text: str
    """The cell file, twins included."""
    spec: CellSpec
    fleet: Fleet
    types: Mapping[str, DeviceTypeEntry]
    """What slots of a type are, where that was said."""
    env: Mapping[DeviceId, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables of a worker on a device."""
    size: DeviceSize = UNLIMITED
    """Of a device whose type states none."""

    @property
    def virtual_clusters(self) -> list[str]:
        """Without the twins."""
        return [vc.name for vc in self.spec.virtual_clusters if not vc.name.endswith(_TWIN)]

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

    def setup(self, policy: str) -> dict[str, Any]:
        """As a recording keeps it."""
        return {
            "cluster": self.text,
            "sharing": "cells",
            "policy": policy,
            "lends": True,
            "overhead": 0.0,
            "nodes": None,
            "profiles": None,
        }

    def scheduler_state(self, policy: str) -> SchedulerState:
        placer = CellPlacer(self.spec, lends=True)
        weights = {vc.name: vc.weight for vc in self.spec.virtual_clusters}
        return SchedulerState(placer.fleet, vcs_by_policy(list(weights), weights, policy), placer)

    def request(self, id_: str, spec: JobSpec, vc: str, submitted: float) -> JobRequest:
        """What the job asks of the scheduler. Raises `Unplaceable` if it can never have it."""
        types = self._usable(spec)
        placer = CellPlacer(self.spec, lends=True)
        counts = self.fleet.totals if spec.opportunistic else placer.capacity(vc)
        whole = sum if spec.mix_types else max
        room = whole([counts.get(type_, 0) for type_ in types or self.fleet.totals] or [0])
        if spec.min > room:
            whose = "the whole cluster" if spec.opportunistic else f"virtual cluster {vc!r}"
            told = ", ".join(f"{number} {type_}" for type_, number in counts.items()) or "no devices"
            among = "" if not types else f" among {', '.join(types)}"
            once = "" if spec.mix_types or len(counts) < 2 else ", of which it may use one type at a time"
            raise Unplaceable(
                f"the job needs at least {spec.min} devices{among}, and {whose} has {told}{once}; ask for fewer: --min"
            )
        largest = min(spec.largest, room)
        request = JobRequest(
            id=JobId(id_),
            vc=f"{vc}{_TWIN}" if spec.opportunistic else vc,
            submitted=submitted,
            devices=spec.min if spec.opportunistic else largest,
            min_devices=spec.min,
            max_devices=largest,
            types=types,
            mixes_types=spec.mix_types,
            virtual_workers=spec.virtual_workers,
            priority=spec.priority,
            workload=spec.workload,
            work=None if spec.steps is None else float(spec.steps),
        )
        self._try(request, placer, types or tuple(counts))
        return request

    def _try(self, request: JobRequest, placer: CellPlacer, types: Sequence[str]) -> None:
        """Alone, on an empty cluster."""
        if request.mixes_types:
            return
        borrowed = request.vc.endswith(_TWIN)
        refusals = []
        for type_ in types:
            answer = placer.place(request, {type_: max(1, request.smallest)}, borrowed)
            if not isinstance(answer, PlacementRefused):
                return
            refusals.append(answer.reason)
        raise Unplaceable(f"no cell of {request.vc} can hold it: {'; '.join(refusals) or 'there are none'}")

    def _usable(self, spec: JobSpec) -> tuple[str, ...]:
        """The types that the job may use and that are large enough for it; empty: all."""
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
            told = "; ".join(
                f"{type_}: {size.cpus:g} CPUs, {size.memory} bytes" for type_, size in sizes.items()
            )
            raise Unplaceable(
                f"no device has {spec.cpu or 0:g} CPUs and {spec.memory or 0} bytes of memory for a worker of the job "
                f"({told}); ask for less: --cpu, --memory"
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


def read_layout(
    text: str, env: Mapping[DeviceId, Mapping[str, str]] | None = None, size: DeviceSize = UNLIMITED
) -> ClusterLayout:
    """The layout that a cell file describes."""
    file, _, problems = read(text)
    if file is None or problems:
        raise unsound(problems)
    document = yaml.safe_load(text)
    tenants = document["virtual_clusters"]
    for name in [name for name in tenants if not name.endswith(_TWIN)]:
        tenants.setdefault(f"{name}{_TWIN}", {"weight": file.virtual_clusters[name].weight})
    whole = yaml.safe_dump(document, sort_keys=False)
    spec, problems = parse(whole)
    if spec is None:
        raise unsound(problems)
    return ClusterLayout(whole, spec, fleet_of(spec), file.device_types, env or {}, size)


def unsound(problems: Sequence[object], where: str = "") -> UsageError:
    return UsageError(
        "the cluster is no sound cell file:\n" + "\n".join(f"  {where}{each}" for each in problems)
    )

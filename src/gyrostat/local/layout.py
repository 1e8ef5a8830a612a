"""What this machine offers to jobs: its devices, the cells and tenants that they are divided into, and what each slot means.

Three ways to say so: `cpu:4` or `fast:2@400,slow:2@100` (types of slots, so many of each, perhaps paced at so many samples per
second), a cell file (docs/reference/cells.md) whose machines are parts of this one, or nothing, and what is there is found. All
become a cell file, for there is one way to share: every VC has its cells, and besides it a twin without any for its
opportunistic jobs, which live on what nobody uses. The text is kept with every recording; `sim` reads it, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gyrostat.core.devices import DeviceId, Fleet
from gyrostat.core.errors import Unplaceable, UsageError
from gyrostat.core.request import JobId, JobRequest
from gyrostat.job.control.device_assignment import Slot
from gyrostat.local.records import DEFAULT_VC, DeviceRecord, JobSpec
from gyrostat.sched.cells.file import DeviceTypeEntry, read
from gyrostat.sched.cells.spec import CellSpec, parse
from gyrostat.sched.placers.base import PlacementRefused
from gyrostat.sched.placers.cells import CellPlacer, fleet_of
from gyrostat.sched.policies.by_vc import vcs_by_policy
from gyrostat.sched.state import SchedulerState

_TWIN = ".opportunistic"
_SLOTS = re.compile(r"(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*):(?P<count>\d+)(@(?P<pace>\d+(\.\d+)?))?")
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class MachineLayout:
    """A machine as its jobs see it."""

    text: str
    """The cell file, twins included."""
    spec: CellSpec
    fleet: Fleet
    types: Mapping[str, DeviceTypeEntry]
    """What slots of a type are, where that was said."""
    env: Mapping[DeviceId, Mapping[str, str]] = field(default_factory=dict)
    """What a worker on a device is told by its environment."""

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
            for type_, (cpus, memory) in sizes.items()
            if (spec.cpu or 0) <= cpus and (spec.memory or 0) <= memory
        ]
        if not found:
            told = "; ".join(
                f"{type_}: {cpus:g} CPUs, {memory} bytes" for type_, (cpus, memory) in sizes.items()
            )
            raise Unplaceable(
                f"no device has {spec.cpu or 0:g} CPUs and {spec.memory or 0} bytes of memory for a worker of the job "
                f"({told}); ask for less: --cpu, --memory"
            )
        return tuple(found) if spec.types or len(found) < len(self.fleet.totals) else ()

    def _size(self, type_: str) -> tuple[float, int]:
        """CPUs and bytes of memory of a slot; the whole machine's where that was not said."""
        entry, (cpus, memory) = self._entry(type_), _this_machine()
        return entry.cpus or cpus, entry.memory or memory

    def _entry(self, type_: str) -> DeviceTypeEntry:
        return self.types.get(type_, DeviceTypeEntry())

    def _cell(self, node: str) -> str:
        for hierarchy in self.spec.hierarchies:
            nodes = self.spec.layouts[hierarchy.name].nodes
            if node in nodes:
                size = hierarchy.nodes_in(len(hierarchy.types) - 1)
                return f"{hierarchy.name}-{nodes.index(node) // size}"
        return node


def read_layout(text: str, env: Mapping[DeviceId, Mapping[str, str]] | None = None) -> MachineLayout:
    """Of the text of a cell file."""
    file, _, problems = read(text)
    if file is None or problems:
        raise _unsound(problems)
    document = yaml.safe_load(text)
    tenants = document["virtual_clusters"]
    for name in [name for name in tenants if not name.endswith(_TWIN)]:
        tenants.setdefault(f"{name}{_TWIN}", {"weight": file.virtual_clusters[name].weight})
    whole = yaml.safe_dump(document, sort_keys=False)
    spec, problems = parse(whole)
    if spec is None:
        raise _unsound(problems)
    return MachineLayout(whole, spec, fleet_of(spec), file.device_types, env or {})


def layout_of_file(path: Path) -> MachineLayout:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    _, problems = parse(text)
    if problems:
        raise _unsound(problems, f"{path}:")
    return read_layout(text)


def layout_of_slots(text: str, env: Mapping[DeviceId, Mapping[str, str]] | None = None) -> MachineLayout:
    """`cpu:4`, or `fast:2@400,slow:2@100`: types of slots, how many of each, and their pace."""
    document: dict[str, Any] = {
        "cell_types": {},
        "physical_cluster": [],
        "virtual_clusters": {DEFAULT_VC: {"cells": {}}},
        "device_types": {},
    }
    for part in text.split(","):
        found = _SLOTS.fullmatch(part.strip())
        if found is None or not int(found["count"]) or found["type"] in document["device_types"]:
            raise UsageError(
                f"devices are written TYPE:COUNT, such as cpu:4, or TYPE:COUNT@PACE with a pace in samples per second, such "
                f"as fast:2@400,slow:2@100, each type once; {part!r} in {text!r} is not"
            )
        type_, node = found["type"], f"{found['type']}-slots"
        document["cell_types"][node] = {"of": type_, "count": int(found["count"]), "node": True}
        document["physical_cluster"].append({"cell": node, "nodes": [type_]})
        document["virtual_clusters"][DEFAULT_VC]["cells"][node] = 1
        document["device_types"][type_] = {"pace": float(found["pace"])} if found["pace"] else {}
    return read_layout(yaml.safe_dump(document, sort_keys=False), env)


def found_layout() -> MachineLayout:
    """This machine's GPUs, by model; without any, one CPU slot per core."""
    gpus: dict[str, list[int]] = {}
    for number, path in enumerate(sorted(_GPUS.glob("*/information"))):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        gpus.setdefault(_slug(model[1] if model else "gpu"), []).append(number)
    if not gpus:
        return layout_of_slots(f"cpu:{len(os.sched_getaffinity(0))}")
    visible = [number for numbers in gpus.values() for number in numbers]
    env = {device: {"CUDA_VISIBLE_DEVICES": str(number)} for device, number in enumerate(visible)}
    return layout_of_slots(",".join(f"{type_}:{len(numbers)}" for type_, numbers in gpus.items()), env)


def _this_machine() -> tuple[float, int]:
    """Its CPUs, and its memory in bytes."""
    return len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _slug(model: str) -> str:
    """`Tesla V100-SXM2-16GB` is a v100."""
    words = [word for word in re.split(r"[^a-z0-9]+", model.lower()) if word]
    known = [word for word in words if re.fullmatch(r"[a-z]{1,3}\d{2,4}[a-z]*", word)]
    return known[0] if known else "-".join(words) or "gpu"


def _unsound(problems: Sequence[object], where: str = "") -> UsageError:
    return UsageError(
        "the cluster is no sound cell file:\n" + "\n".join(f"  {where}{each}" for each in problems)
    )

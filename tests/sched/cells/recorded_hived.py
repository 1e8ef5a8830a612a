"""Decisions of HiveD's own code, and our allocator's in the same states.

Before each recorded request, our cluster is put into HiveD's state: the same jobs on the same devices and virtual cells,
the same bad machines. So a decision is compared by itself, and no difference causes later ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gyrostat.sched.cells.allocator import CellCluster
from gyrostat.sched.cells.bindings import JobBinding, PieceBinding, PodBinding, restore
from gyrostat.sched.cells.load import loads
from gyrostat.sched.cells.request import OPPORTUNISTIC, CellRefusal, CellRequest, Grant, PodGroup
from gyrostat.sched.cells.spec import CellSpec


@dataclass(frozen=True)
class RunningGang:
    binding: JobBinding
    devices: int


@dataclass
class ComparedDecision:
    """One request: what HiveD decided, and what we do in the same state."""

    event: Mapping[str, Any]
    ours: Grant | CellRefusal
    short: bool
    """Whether some tenant's cells do not all fit on healthy devices at that time."""
    gangs: Mapping[str, RunningGang] = field(repr=False)

    @property
    def granted_by_hived(self) -> bool:
        return bool(self.event["dec"] != "wait")

    def taken(self, victims: Sequence[str], *, borrowed: bool) -> int:
        """Devices of those of the victims that are opportunistic, or that are not."""
        gangs = [self.gangs[victim] for victim in victims]
        return sum(gang.devices for gang in gangs if (gang.binding.priority == OPPORTUNISTIC) == borrowed)


def read_spec(path: Path) -> tuple[CellSpec, dict[str, list[tuple[str, int]]]]:
    """The cluster that HiveD's file describes, and the cells of each tenant in the order in which HiveD numbers them."""
    document = yaml.safe_load(path.read_text())
    types = document["physicalCluster"]["cellTypes"]
    tenants = {
        name: [(cells["cellType"].rpartition(".")[2], cells["cellNumber"]) for cells in vc["virtualCells"]]
        for name, vc in document["virtualClusters"].items()
    }
    ours = {
        "cell_types": {
            name: {
                "of": entry["childCellType"],
                "count": entry["childCellNumber"],
                "node": entry.get("isNodeLevel", False),
            }
            for name, entry in types.items()
        },
        "physical_cluster": [
            {"cell": cell["cellType"], "nodes": [child["cellAddress"] for child in cell["cellChildren"]]}
            for cell in document["physicalCluster"]["physicalCells"]
        ],
        "virtual_clusters": {name: {"cells": dict(cells)} for name, cells in tenants.items()},
    }
    return loads(yaml.safe_dump(ours), path.name), tenants


def compare(path: Path, *, lazy: bool) -> Iterator[ComparedDecision]:
    """All requests of a recorded sequence. `lazy`: guaranteed jobs that we would preempt become opportunistic first."""
    record = json.loads(path.read_text())
    spec, tenants = read_spec(path.with_name(f"{record['config']}.yaml"))
    gangs: dict[str, RunningGang] = {}
    bad: set[str] = set()
    for event in record["events"]:
        match event["ev"]:
            case "end":
                gangs.pop(event["gang"], None)
            case "bad":
                bad.add(event["node"])
            case "good":
                bad.discard(event["node"])
            case "submit" if event["dec"] != "panic":
                ours, short = _decide(spec, event, gangs, bad)
                if lazy and isinstance(ours, Grant):
                    downgraded = {
                        victim: _opportunistic(gangs[victim])
                        for victim in ours.preempted
                        if gangs[victim].binding.priority != OPPORTUNISTIC
                    }
                    if downgraded:
                        ours, _ = _decide(spec, event, {**gangs, **downgraded}, bad)
                yield ComparedDecision(event, ours, short, dict(gangs))
                if event["dec"] != "wait":
                    for victim in event.get("victims", ()):
                        gangs.pop(victim, None)
                    gangs[event["gang"]] = _running(spec, tenants[event["vc"]], event)
        for lazied in event.get("lazied", ()):
            if lazied in gangs:
                gangs[lazied] = _opportunistic(gangs[lazied])


def _decide(
    spec: CellSpec, event: Mapping[str, Any], gangs: Mapping[str, RunningGang], bad: set[str]
) -> tuple[Grant | CellRefusal, bool]:
    cluster = CellCluster(spec)
    for gang in sorted(gangs.values(), key=lambda gang: -gang.binding.priority):
        change = restore(cluster, gang.binding)
        assert change is None, change
    for node in sorted(bad):
        cluster.set_health(node, False)
    short = bool(cluster.shortfall())
    # HiveD searches device types at random if none is named; the recording has the order.
    named = [event["type"]] if event["type"] else [type_ for call in event.get("order", ()) for type_ in call]
    for device_type in dict.fromkeys(named or [None]):
        answer = cluster.allocate(
            CellRequest(
                job=event["gang"],
                vc=event["vc"],
                pods=(PodGroup(event["gpus"], event["pods"]),),
                priority=event["pri"],
                device_type=device_type,
            )
        )
        if isinstance(answer, Grant):
            break
    return answer, short


def _running(spec: CellSpec, tenant: list[tuple[str, int]], event: Mapping[str, Any]) -> RunningGang:
    (hierarchy,) = (one for one in spec.hierarchies if one.name == event["chain"])
    pods = []
    for number, placed in enumerate(event["place"]):
        devices = tuple(f"{placed['n']}/{index}" for index in placed["g"])
        cells: list[tuple[str | None, int]] = [(None, -1)] * len(devices)
        if event["pri"] != OPPORTUNISTIC:
            cells = [
                _virtual(hierarchy.types, hierarchy.sizes, tenant, name) for name in event["virt"][number]
            ]
        pieces = [
            PieceBinding(hierarchy.device_type, device, *cell)
            for device, cell in zip(devices, cells, strict=True)
        ]
        pods.append(PodBinding(tuple(pieces), devices, 1))
    binding = JobBinding(event["gang"], event["vc"], event["pri"], hierarchy.name, tuple(pods))
    return RunningGang(binding, event["pods"] * event["gpus"])


def _virtual(
    types: Sequence[str], sizes: Sequence[int], tenant: list[tuple[str, int]], name: str
) -> tuple[str, int]:
    """`VC/CELL/…/DEVICE`: the type of the tenant's cell, and the device's number among all its cells of that type."""
    _, cell, *rest = name.split("/")
    first = 0
    for root, count in tenant:
        if int(cell) < first + count:
            return root, (int(cell) - first) * sizes[types.index(root)] + int(rest[-1] if rest else 0)
        first += count
    raise AssertionError(f"the tenant has no cell {name}")


def _opportunistic(gang: RunningGang) -> RunningGang:
    pods = tuple(
        PodBinding(tuple(PieceBinding(piece.cell, piece.at) for piece in pod.pieces), pod.devices, pod.level)
        for pod in gang.binding.pods
    )
    return RunningGang(
        JobBinding(gang.binding.job, gang.binding.vc, OPPORTUNISTIC, gang.binding.hierarchy, pods),
        gang.devices,
    )

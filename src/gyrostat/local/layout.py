"""The devices of this machine as a `ClusterLayout`.

Devices are given as slots (`cpu:4`, or `fast:2@400,slow:2@100`: type, number, pace in samples per second), as a cell file
(docs/reference/cells.md) whose nodes are parts of this machine, or are detected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gyrostat.cluster.layout import ClusterLayout, DeviceSize, read_layout, unsound
from gyrostat.cluster.records import DEFAULT_VC
from gyrostat.core.devices import DeviceId
from gyrostat.core.errors import UsageError
from gyrostat.core.files import read_text
from gyrostat.sched.cells.load import parse

_SLOTS = re.compile(r"(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*):(?P<count>\d+)(@(?P<pace>\d+(\.\d+)?))?")
_GPUS = Path("/proc/driver/nvidia/gpus")


def layout_of_file(path: Path) -> ClusterLayout:
    text = read_text(path)
    _, problems = parse(text)
    if problems:
        raise unsound(problems, f"{path}:")
    return read_layout(text, size=machine_size())


def layout_of_slots(text: str, env: Mapping[DeviceId, Mapping[str, str]] | None = None) -> ClusterLayout:
    """`cpu:4`, or `fast:2@400,slow:2@100`: types of slots, their numbers and paces."""
    document: dict[str, Any] = {
        "cell_types": {},
        "physical_cluster": [],
        "virtual_clusters": {DEFAULT_VC: {"cells": {}, "servers": _server_cores()}},
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
    return read_layout(yaml.safe_dump(document, sort_keys=False), env, machine_size())


def _server_cores() -> dict[str, int]:
    """Parameter servers may use the cores and memory of this machine, beside the slots of workers."""
    whole = machine_size()
    return {"cores": int(whole.cpus), "memory": int(whole.memory)}


def found_layout() -> ClusterLayout:
    """This machine's GPUs, by model; without GPUs, one CPU slot per core."""
    gpus: dict[str, list[int]] = {}
    for number, path in enumerate(sorted(_GPUS.glob("*/information"))):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        gpus.setdefault(_slug(model[1] if model else "gpu"), []).append(number)
    if not gpus:
        return layout_of_slots(f"cpu:{len(os.sched_getaffinity(0))}")
    visible = [number for numbers in gpus.values() for number in numbers]
    env = {device: {"CUDA_VISIBLE_DEVICES": str(number)} for device, number in enumerate(visible)}
    return layout_of_slots(",".join(f"{type_}:{len(numbers)}" for type_, numbers in gpus.items()), env)


def _slug(model: str) -> str:
    """`Tesla V100-SXM2-16GB` is a v100."""
    words = [word for word in re.split(r"[^a-z0-9]+", model.lower()) if word]
    known = [word for word in words if re.fullmatch(r"[a-z]{1,3}\d{2,4}[a-z]*", word)]
    return known[0] if known else "-".join(words) or "gpu"


def machine_size() -> DeviceSize:
    """All of this machine: the most that a worker on a device whose type states no size may use."""
    return DeviceSize(len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

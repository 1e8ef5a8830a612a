"""What a machine offers, from slots or a cell file; and what of it a job can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.layout import DeviceSize, read_layout
from gyrostat.core.errors import Unplaceable, UsageError
from gyrostat.core.plan import Start
from gyrostat.local import layout
from gyrostat.local.layout import layout_of_file, layout_of_slots
from gyrostat.sched.port import Snapshot, Submitted
from gyrostat.sched.tick import tick

FILE = """
cell_types:
  box: {of: cpu, count: 2, node: true}
  small: {of: tiny, count: 2, node: true}
physical_cluster:
  - {cell: box, nodes: [b0, b1]}
  - {cell: small, nodes: [s0]}
virtual_clusters:
  vision: {cells: {box: 1}, weight: 2}
  speech: {cells: {box: 1, tiny: 1}}
device_types:
  cpu: {cpus: 2, memory: 1000}
  tiny: {pace: 10, cpus: 0.5}
"""


def spec(**fields: object) -> JobSpec:
    return JobSpec(script="train.py", **{"virtual_workers": 8, **fields})  # type: ignore[arg-type]


def test_slots_are_written_by_type() -> None:
    machine = layout_of_slots("fast:2@400, slow:1@2.5,cpu:1")
    assert machine.virtual_clusters == ["default"]
    assert machine.fleet.totals == {"fast": 2, "slow": 1, "cpu": 1}
    assert [machine.slot(device).paced for device in range(4)] == [400.0, 400.0, 2.5, None]
    assert [machine.record(device).name for device in range(4)] == ["fast/0", "fast/1", "slow/0", "cpu/0"]
    assert read_layout(machine.text).text == machine.text, "a recording keeps the text, and it means the same"


@pytest.mark.parametrize("text", ["", "cpu", "cpu:0", "cpu:x", "cpu:2@", "cpu:2,cpu:1", "c pu:1", "cpu:-1"])
def test_other_writings_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="devices are written TYPE:COUNT, such as cpu:4"):
        layout_of_slots(text)


def test_a_cell_file_says_what_slots_are(tmp_path: Path) -> None:
    path = tmp_path / "cells.yaml"
    path.write_text(FILE)
    machine = layout_of_file(path)
    assert machine.virtual_clusters == ["vision", "speech"]
    assert [machine.slot(device).paced for device in range(6)] == [None] * 4 + [10.0] * 2
    assert machine.record(4).cpus == 0.5
    assert machine.record(2).cell == "box-1"
    path.write_text(FILE.replace("pace: 10", "pace: -1"))
    with pytest.raises(UsageError, match=r"cells.yaml:line 13: device_types.tiny.pace"):
        layout_of_file(path)
    with pytest.raises(UsageError, match="cannot be read"):
        layout_of_file(tmp_path / "none.yaml")


def test_what_a_job_may_have() -> None:
    machine = read_layout(FILE)
    request = machine.request("j1", spec(), "vision", 3.0)
    assert (request.vc, request.devices, request.smallest, request.largest) == ("vision", 2, 1, 2)
    mixed = machine.request("j1", spec(mix_types=True), "speech", 3.0)
    assert (mixed.largest, mixed.types) == (3, ())
    low = machine.request("j1", spec(opportunistic=True, types=("cpu",)), "vision", 3.0)
    assert (low.vc, low.devices, low.smallest, low.largest) == ("vision.opportunistic", 1, 1, 4)
    assert machine.request("j1", spec(cpu=1.0), "speech", 0.0).types == ("cpu",)
    with pytest.raises(Unplaceable, match="at least 3 devices, and virtual cluster 'vision' has 2 cpu"):
        machine.request("j1", spec(min=3), "vision", 0.0)
    with pytest.raises(
        Unplaceable,
        match=r"no device has 1 CPUs and 2000 bytes of memory .*cpu: 2 CPUs, 1000 bytes; tiny: 0.5 CPUs, .*ask for less",
    ):
        machine.request("j1", spec(cpu=1.0, memory=2000), "speech", 0.0)


def test_a_slot_of_which_nothing_is_said_has_at_most_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "machine_size", lambda: DeviceSize(8, 4000))
    machine = layout_of_slots("cpu:4")
    assert machine.request("j1", spec(cpu=8.0, memory=4000), "default", 0.0).largest == 4
    for more in ({"cpu": 9.0}, {"memory": 4001}):
        with pytest.raises(Unplaceable, match=r"\(cpu: 8 CPUs, 4000 bytes\); ask for less"):
            machine.request("j1", spec(**more), "default", 0.0)


def test_gpus_are_found_by_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, model in enumerate(["Tesla V100-SXM2-16GB", "NVIDIA A100-PCIE-40GB", "Tesla V100-SXM2-16GB"]):
        gpu = tmp_path / f"0000:0{number}:00.0"
        gpu.mkdir()
        (gpu / "information").write_text(f"Model: \t {model}\nIRQ: 33\n")
    monkeypatch.setattr(layout, "_GPUS", tmp_path)
    found = layout.found_layout()
    assert found.fleet.totals == {"v100": 2, "a100": 1}
    visible = [found.slot(device).env["CUDA_VISIBLE_DEVICES"] for device in range(3)]
    assert visible == ["0", "2", "1"]
    monkeypatch.setattr(layout, "_GPUS", tmp_path / "none")
    assert list(layout.found_layout().fleet.totals) == ["cpu"]


@pytest.mark.parametrize("policy", ["fifo", "priority", "wfs", "tiresias"])
def test_opportunistic_jobs_live_on_what_nobody_uses(policy: str) -> None:
    machine = read_layout(FILE)
    scheduler_state = machine.scheduler_state(policy)
    low = machine.request("low", spec(opportunistic=True, types=("cpu",)), "vision", 0.0)
    (started,) = tick(scheduler_state, Snapshot(0.0, (Submitted(low),))).actions
    assert isinstance(started, Start)
    assert started.borrowed == started.devices
    assert len(started.devices) == (4 if policy == "wfs" else 1)
    high = machine.request("high", spec(min=2), "speech", 1.0)
    actions = tick(scheduler_state, Snapshot(1.0, (Submitted(high),))).actions
    (guaranteed,) = [action for action in actions if action.job == "high"]
    assert isinstance(guaranteed, Start)
    assert (len(guaranteed.devices), guaranteed.borrowed) == (2, ())

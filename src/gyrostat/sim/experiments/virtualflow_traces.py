"""VirtualFlow's released traces as jobs, on the paper's V100s.

Steps: `num_steps`, per epoch if `num_epochs` is given too, else epochs over the data set. Virtual workers: requested
devices times `num_virtual_nodes_per_device`; a micro-batch larger than any measured is halved, and there are twice as many.
ResNet on ImageNet was not profiled on V100: Gavel's ResNet-50 is used. QNLI is assumed to be as fast as SST-2.

The profiles are of one device and have no exchange of gradients. `exchange` adds one: a multiple of what ResNet-50 with the
smallest batch takes on Gavel's V100s, the same for every workload (the paper's models are as large or larger).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.planner.throughput import PlannedThroughput, workload_name
from gyrostat.sim.experiments.finding import ExperimentContext
from gyrostat.sim.experiments.playing import VC, read_profiles
from gyrostat.sim.job import TraceJob

TYPE = "v100"
SAMPLES = {"imagenet": 1_281_167, "cifar10": 50_000, "CoLA": 8_551, "SST-2": 67_349, "QNLI": 104_743}


class VirtualFlowTrace:
    """The jobs of one file, static or elastic."""

    def __init__(self, context: ExperimentContext, name: str, *, exchange: float = 0.0) -> None:
        self._entries: list[dict[str, Any]] = json.loads(context.file(f"virtualflow/{name}").read_text())
        profiles = read_profiles(context.file("virtualflow/profiles.json"))
        gavel = read_profiles(context.file("gavel_throughputs.json"))
        resnet = gavel["ResNet-50"].speed(TYPE)
        profiles["resnet-imagenet"] = Profile("resnet-imagenet", {TYPE: Speed(resnet.throughput)})
        profiles["bert-glue-QNLI"] = profiles["bert-glue-SST-2"]
        if exchange:
            points = tuple((number, exchange * seconds) for number, seconds in resnet.exchange)
            profiles = {
                workload: Profile(workload, {TYPE: Speed(profile.speed(TYPE).throughput, points)})
                for workload, profile in profiles.items()
                if TYPE in profile.types
            }
        self._profiles: Mapping[str, Profile] = profiles
        self.throughput = PlannedThroughput(profiles)

    def jobs(self, *, elastic: bool, stretch: float = 1.0) -> Iterator[TraceJob]:
        """With `stretch` times the work each."""
        for number, entry in enumerate(self._entries):
            request = self._request(number, entry, elastic)
            rate = self.throughput.rate(request, {TYPE: request.devices})
            yield TraceJob(request, stretch * _steps(entry) / rate)

    def _request(self, number: int, entry: Mapping[str, Any], elastic: bool) -> JobRequest:
        profile = self._profiles[_profile_name(entry)]
        workers = entry["gpu_demand"] * entry.get("num_virtual_nodes_per_device", 1)
        batch = entry["batch_size"] // workers
        while batch > profile.speed(TYPE).largest_batch:
            batch, workers = batch // 2, workers * 2
        return JobRequest(
            id=JobId(f"job{number}"),
            vc=VC,
            submitted=float(entry["arrival_time"]),
            devices=entry["gpu_demand"],
            min_devices=1 if elastic else None,
            max_devices=workers if elastic else None,
            types=(TYPE,),
            virtual_workers=workers,
            affinity=Affinity.SOFT,
            priority=entry["priority"],
            workload=workload_name(profile.workload, batch),
        )


def _profile_name(entry: Mapping[str, Any]) -> str:
    match entry["workload"]:
        case "resnet":
            return f"resnet-{entry['dataset']}"
        case "bert":
            return f"bert-glue-{entry['glue_task']}"
        case other:
            return str(other)


def _steps(entry: Mapping[str, Any]) -> float:
    epochs = entry.get("num_epochs", 1)
    if "num_steps" in entry:
        return float(entry["num_steps"] * epochs)
    samples = SAMPLES[entry.get("dataset") or entry["glue_task"]]
    return float(epochs * samples / entry["batch_size"])

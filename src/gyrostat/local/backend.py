"""The cluster on this machine behind its service: implements `service.ClusterBackend`. May be used from any thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.layout import ClusterLayout
from gyrostat.cluster.records import DeviceRecord, JobRecord, JobState, Waiting
from gyrostat.cluster.registry import Registry
from gyrostat.cluster.waiting import explain_waiting, waits_for
from gyrostat.core.devices import DeviceId
from gyrostat.core.errors import UsageError, WrongState
from gyrostat.core.plural import plural
from gyrostat.core.roles import ServerCapacity
from gyrostat.job.control.client import JobClient, RequestFailed
from gyrostat.job.control.profiling import SizeMeasured
from gyrostat.job.control.requests import RequestResult
from gyrostat.local.cluster import LocalCluster
from gyrostat.local.home import Home
from gyrostat.sched.state import SchedulerState


class LocalBackend:
    def __init__(
        self, home: Home, registry: Registry, layout: ClusterLayout, cluster: LocalCluster, grace: float
    ) -> None:
        self._home, self._registry, self._layout, self._cluster = home, registry, layout, cluster
        self._grace = grace

    def virtual_clusters(self) -> Sequence[str]:
        return self._layout.virtual_clusters

    def server_capacity(self, vc: str) -> ServerCapacity:
        return self._layout.spec.servers[vc]

    def check_placeable(self, spec: JobSpec, vc: str) -> None:
        self._layout.request("new", spec, vc, 0.0)

    def wake(self, id_: str) -> None:
        self._cluster.enqueue(id_)

    def capacity(self) -> Mapping[str, int]:
        return self._layout.fleet.totals

    def devices(self) -> list[DeviceRecord]:
        records = {record.id: record for record in self._registry.jobs() if not record.state.over}
        reserved = self._cluster.ask(_withdrawn)
        return [
            self._device(number, records, number in reserved) for number in range(len(self._layout.fleet))
        ]

    def _device(self, number: DeviceId, records: Mapping[str, JobRecord], reserved: bool) -> DeviceRecord:
        device = replace(self._layout.record(number), reserved=reserved)
        jobs = [records[job] for job in self._cluster.occupancy.on(number) if job in records]
        if not jobs:
            return device
        return replace(device, job=jobs[0].id, tenant=jobs[0].tenant, borrowed=number in jobs[0].borrowed)

    def waiting(self, id_: str) -> Waiting | None:
        record = self._registry.get(id_)
        if not record.holds_devices and (holders := self._cluster.occupancy.holders(id_, record.devices)):
            return waits_for(record, holders, self._grace)
        return self._cluster.ask(
            lambda scheduler_state: explain_waiting(scheduler_state, record, self._registry.clock())
        )

    def migrate(self, id_: str, workers: tuple[int, ...]) -> RequestResult:
        with self._connect(id_) as job_client:
            answer = job_client.migrate(workers or job_client.status().members)
        if not answer.done:
            raise RequestFailed(answer.text)
        return answer

    def profile(
        self, id_: str, smallest: int | None, largest: int | None, steps: int
    ) -> tuple[SizeMeasured, ...]:
        record = self._registry.get(id_)
        if largest is not None and largest > len(record.devices):
            raise UsageError(
                f"job {id_} has {plural(len(record.devices), 'device')} and cannot be measured on {largest}"
            )
        with self._connect(id_) as job_client:
            return job_client.profile(smallest, largest, steps)

    def _connect(self, id_: str) -> JobClient:
        record = self._registry.get(id_)
        if record.state is not JobState.RUNNING:
            raise WrongState(f"job {id_} is {record.state}; only a running job can do this")
        return JobClient(id_, at=self._home.control_sockets)

    def reserve(self, wanted: Mapping[str, int], wait: float) -> bool:
        deadline = time.monotonic() + wait
        self._cluster.reserve(wanted)
        if not wait:
            return False
        taken = self._cluster.ask(_withdrawn)
        return self._cluster.occupancy.await_free(taken, max(0.0, deadline - time.monotonic()))

    def shut_down(self, checkpoint: bool) -> None:
        self._cluster.shut_down(checkpoint)


def _withdrawn(scheduler_state: SchedulerState) -> set[DeviceId]:
    """Devices reserved for serving loads."""
    return scheduler_state.availability.withdrawn

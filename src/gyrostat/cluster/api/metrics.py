"""Metrics for Prometheus: the state of the cluster at the time of the request, and counters of the API's requests."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gyrostat.cluster.records import JobRecord, JobState

if TYPE_CHECKING:
    from gyrostat.cluster.service import ClusterService

_JOB = ("job", "name", "tenant", "vc")


class Metrics:
    """The metrics of one cluster."""

    media_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, service: ClusterService) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Cluster(service))
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "gyrostat_api_requests",
            "Requests by operation and status",
            ["operation", "status"],
            registry=self._registry,
        )

    def count(self, operation: str, status: int) -> None:
        self._requests.labels(operation, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Cluster(Collector):
    """Reads the service at every scrape."""

    def __init__(self, service: ClusterService) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """Nothing in advance: otherwise the registry would call `collect` for the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        jobs = self._service.jobs(None)
        yield _jobs(jobs)
        yield from _progress([record for record in jobs if not record.state.over])
        devices = GaugeMetricFamily("gyrostat_devices", "Devices by type and use", labels=["type", "use"])
        uses = Tally(
            (device.type, "reserved" if device.reserved else "free" if device.job is None else "busy")
            for device in self._service.devices()
        )
        for labels, number in sorted(uses.items()):
            devices.add_metric(labels, number)
        yield devices
        yield GaugeMetricFamily(
            "gyrostat_trouble",
            "1 if the cluster does not work as it should, for example because of a full disk",
            value=self._service.trouble() is not None,
        )


def _jobs(jobs: list[JobRecord]) -> Metric:
    family = GaugeMetricFamily("gyrostat_jobs", "Jobs by state and tenant", labels=["state", "tenant"])
    numbers = Tally((str(record.state), record.tenant) for record in jobs)
    for tenant in sorted({record.tenant for record in jobs}):
        for state in JobState:
            family.add_metric([state, tenant], numbers[(str(state), tenant)])
    return family


def _progress(jobs: list[JobRecord]) -> Iterator[Metric]:
    """Of every job that has not ended; unknown values are omitted."""
    for name, meaning, value in (
        ("step", "Steps that are complete", lambda record: record.step),
        ("loss", "Virtual worker 0's loss", lambda record: record.loss),
        ("throughput", "Samples per second", lambda record: record.throughput),
        ("devices", "Devices that it holds", lambda record: len(record.devices)),
        ("attempts", "How often it was started", lambda record: record.attempts),
        ("submitted_seconds", "When it was submitted, since the epoch", lambda record: record.submitted),
    ):
        family = GaugeMetricFamily(f"gyrostat_job_{name}", meaning, labels=_JOB)
        for record in jobs:
            number = value(record)
            if number is not None:
                family.add_metric([record.id, record.name, record.tenant, record.vc], number)
        yield family

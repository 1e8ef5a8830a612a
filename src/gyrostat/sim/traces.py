"""Traces of clusters: Microsoft's Philly and ITP, Alibaba's of 2023, and our own format.

    form      columns                                                        tenants
    philly    timestamp, duration, num_gpus, cluster (and gpu_time)          the column `cluster`
    itp       job_id, submission_time, duration, num_gpu                     none
    alibaba   name, num_gpu, gpu_milli, gpu_spec, creation_time,             none
              deletion_time, scheduled_time, …
    own       submitted, duration, devices; optional: id, vc, min_devices,   the column `vc`
              max_devices, types (a|b), mixes_types, priority, weight,
              affinity, virtual_workers, workload, work

The format is recognised by the columns. A trace is CSV, or Parquet if its name ends with .parquet (which needs the extra
`gyrostat[parquet]`); times are seconds since any instant. Jobs are sorted by submission, those of one instant in the order
of the file.

Jobs of traces without tenants can be divided: `tenants(jobs, n)` assigns a job to one of n tenants by a hash of its id;
tenant i gets a share of 2^-(i+1), because in most clusters a few tenants have most jobs. The rule needs no seed and does not
depend on other jobs.

File format: the names of columns are those of trace files.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gyrostat.core.errors import UsageError
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sim.job import TraceJob

DEFAULT_VC = "all"
"""The VC of jobs whose trace names none."""
Row = Mapping[str, Any]
_PHILLY_BEGAN = datetime(2017, 9, 4)  # midnight before its first job


def read_trace(path: Path) -> list[TraceJob]:
    """All jobs of a trace, by submission."""
    rows = _rows(path)
    if not rows:
        raise UsageError(f"{path} has no jobs in it")
    parse = _form(path, set(rows[0]))
    jobs: list[TraceJob] = []
    for number, row in enumerate(rows):
        try:
            job = parse(number, row)
        except (ValueError, KeyError, TypeError, UsageError) as error:
            raise UsageError(f"{path}, job {number + 1}: {error}") from error
        if job is not None:
            jobs.append(job)
    jobs.sort(key=lambda job: job.request.submitted)
    return jobs


def _form(path: Path, columns: set[str]) -> Callable[[int, Row], TraceJob | None]:
    for needed, parse in _FORMS:
        if needed <= columns:
            return parse
    raise UsageError(
        f"{path} has no known trace format: its columns are {', '.join(sorted(map(str, columns)))}; a trace of "
        "your own needs submitted, duration and devices (see docs/howto/simulate.md)"
    )


def tenants(jobs: Iterable[TraceJob], number: int) -> list[TraceJob]:
    """The same jobs, divided among tenants t0 … by the rule above."""
    if number < 1:
        raise UsageError(f"the number of tenants must be at least 1, got {number}")
    return [
        replace(job, request=replace(job.request, vc=f"t{_tenant(job.request.id, number)}")) for job in jobs
    ]


def _tenant(id_: str, number: int) -> int:
    draw = int.from_bytes(hashlib.blake2b(id_.encode(), digest_size=8).digest(), "big") / 2**64
    for tenant in range(number - 1):
        if draw < 0.5:
            return tenant
        draw = 2 * draw - 1
    return number - 1


def _rows(path: Path) -> Sequence[Row]:
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is neither CSV nor named .parquet: {error}") from error


def _parquet(path: Path) -> Sequence[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"reading {path} needs pyarrow: pip install 'gyrostat[parquet]', or use CSV"
        ) from error
    if not path.exists():
        raise UsageError(f"{path} cannot be read: there is no such file")
    try:
        rows: Sequence[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} is no Parquet file: {error}") from error
    return rows


def _philly(number: int, row: Row) -> TraceJob | None:
    submitted = (datetime.fromisoformat(row["timestamp"]) - _PHILLY_BEGAN).total_seconds()
    return _job(f"philly-{number}", row["cluster"], submitted, float(row["duration"]), int(row["num_gpus"]))


def _itp(number: int, row: Row) -> TraceJob | None:
    return _job(
        row["job_id"], DEFAULT_VC, float(row["submission_time"]), float(row["duration"]), int(row["num_gpu"])
    )


def _alibaba(number: int, row: Row) -> TraceJob | None:
    """A pod, from its scheduling until its deletion; None if it was never scheduled. A share of a device counts as one."""
    devices = int(row["num_gpu"])
    if not devices or not row["scheduled_time"] or not row["deletion_time"]:
        return None
    duration = float(row["deletion_time"]) - float(row["scheduled_time"])
    return (
        _job(row["name"], DEFAULT_VC, float(row["creation_time"]), duration, devices)
        if duration > 0
        else None
    )


def _own(number: int, row: Row) -> TraceJob | None:
    def given(name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        value = row.get(name)
        return {} if value is None or value == "" else {name: parse(str(value))}

    request = JobRequest(
        id=JobId(str(row.get("id") or f"job-{number}")),
        vc=str(row.get("vc") or DEFAULT_VC),
        submitted=float(row["submitted"]),
        devices=int(row["devices"]),
        **given("min_devices", int),
        **given("max_devices", int),
        **given("types", lambda text: tuple(text.split("|"))),
        **given("mixes_types", _yes_or_no),
        **given("priority", int),
        **given("weight", float),
        **given("affinity", Affinity),
        **given("virtual_workers", int),
        **given("workload", str),
        **given("work", float),
    )
    return TraceJob(request, _positive(float(row["duration"])))


def _job(id_: str, vc: str, submitted: float, duration: float, devices: int) -> TraceJob:
    request = JobRequest(id=JobId(id_), vc=vc, submitted=submitted, devices=devices)
    return TraceJob(request, _positive(duration))


def _yes_or_no(text: str) -> bool:
    known = {"yes": True, "true": True, "no": False, "false": False}
    if text.lower() not in known:
        raise UsageError(f"mixes_types is yes or no, got {text!r}")
    return known[text.lower()]


def _positive(duration: float) -> float:
    if not duration > 0:
        raise UsageError(f"the duration of a job must be more than 0 seconds, got {duration}")
    return duration


_FORMS: Sequence[tuple[set[str], Callable[[int, Row], TraceJob | None]]] = (
    ({"timestamp", "duration", "num_gpus", "cluster"}, _philly),
    ({"job_id", "submission_time", "duration", "num_gpu"}, _itp),
    ({"name", "num_gpu", "creation_time", "deletion_time", "scheduled_time"}, _alibaba),
    ({"submitted", "duration", "devices"}, _own),
)


def between(jobs: Iterable[TraceJob], start: float, stop: float) -> Iterator[TraceJob]:
    """Those submitted from `start` days to `stop` days after the first."""
    first: float | None = None
    for job in jobs:
        first = job.request.submitted if first is None else first
        if start <= (job.request.submitted - first) / 86_400 < stop:
            yield job

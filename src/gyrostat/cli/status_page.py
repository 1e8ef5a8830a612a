"""One job of a cluster as text: a line, or a page. Pure."""

from __future__ import annotations

import time

from gyrostat.cli.cluster_options import clock, plain, span
from gyrostat.cluster.api.messages import JobStatus
from gyrostat.cluster.records import JobRecord, JobState
from gyrostat.core.plural import plural, plural_range


def line(job: JobRecord) -> str:
    """The line of `gyrostat status`."""
    what = "update" if job.spec.servers else "step"
    size = f"{plural(job.spec.virtual_workers, 'virtual worker')} on {len(job.devices)}"
    if job.spec.servers:
        size = f"{plural(len(job.devices), 'worker')} and {plural(job.servers, 'server')}"
    parts = [f"{job.name} ({job.id}): {what} {job.step}", size, str(job.state)]
    if job.loss is not None:
        parts.append(f"loss {job.loss:.4g}")
    if job.throughput is not None:
        parts.append(f"{job.throughput:,.0f} samples/s")
    return ", ".join(parts)


def page(found: JobStatus, now: float | None = None) -> list[str]:
    """The page of `gyrostat status JOB`."""
    job, now = found.job, time.time() if now is None else now
    rows: list[tuple[str, str]] = [
        ("job", f"{job.id}, of {job.tenant} in virtual cluster {job.vc}"),
        ("state", f"{job.state} since {clock(job.changed)}: {job.reason}"),
        ("runs", " ".join([*(["-m"] if job.spec.module else []), job.spec.script, *job.spec.args])),
        ("in", job.spec.workdir),
        (
            "size",
            f"{plural(job.spec.virtual_workers, 'virtual worker')} on {plural_range(job.spec.min, job.spec.largest, 'device')}"
            + (f" of {', '.join(job.spec.types)}" if job.spec.types else ""),
        ),
    ]
    if (role := job.spec.server_role) is not None:
        rows.append(("servers", f"{role.count} with {role.needs}; when one dies: {role.recovery}"))
    if job.devices:
        lent = f" ({len(job.borrowed)} borrowed)" if job.borrowed else ""
        rows.append(("devices", ", ".join(map(str, job.devices)) + lent))
    if job.step:
        rows.append(("progress", line(job).partition(": ")[2]))
    rows.append(("time", f"submitted {span(now - job.submitted)} ago, {span(job.ran_by(now))} with devices"))
    if job.attempts > 1:
        rows.append(("starts", f"{job.attempts}, {job.retries} of them after a failure"))
    if job.worker_deaths:
        rows.append(("deaths", f"{plural(job.worker_deaths, 'worker')}: gyrostat events --job {job.id}"))
    if found.waiting is not None:
        place = f"number {found.waiting.position} in its queue: " if found.waiting.position else ""
        rows.append(("waits", place + found.waiting.why))
        rows.append(("helps", found.waiting.what_helps))
    if job.failure is not None:
        rows.append(("failed", job.failure))
    if job.exit_code is not None and job.state is not JobState.FINISHED:
        rows.append(("exit code", str(job.exit_code)))
    if job.digest is not None:
        rows.append(("digest", job.digest))
    lines = [job.name, *(f"  {name:<10}{text}" for name, text in rows)]
    if job.last_lines and job.state is JobState.FAILED:
        lines += ["  last lines", *(f"    {text}" for text in job.last_lines)]
    return list(map(plain, lines))

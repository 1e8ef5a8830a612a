"""`gyrostat jobs`: the jobs of a cluster as a table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli.cluster_options import (
    AsJson,
    At,
    console,
    devices,
    job_table,
    loss,
    print_json,
    rate,
    servers,
    span,
    tenants,
)
from gyrostat.cluster.records import JobRecord, JobState

if TYPE_CHECKING:
    from rich.table import Table

_HELP = "\n\n".join(
    [
        "List the jobs of the cluster that have not ended, in the order of submission.",
        "  gyrostat jobs                   gyrostat jobs --all",
        "  gyrostat jobs --state failed    gyrostat jobs --json | jq '.[].name'",
        "`gyrostat status JOB` shows more about one job: why it is queued, or how it failed.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("jobs", help=_HELP)(jobs)


def jobs(
    ended: Annotated[bool, typer.Option("--all", "-a", help="Include jobs that have ended.")] = False,
    state: Annotated[
        JobState | None, typer.Option(show_default=False, help="Only jobs in this state.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", show_default=False, help="Only jobs of this tenant.")
    ] = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        found = cluster.jobs(state=state, tenant=tenant)
        wanted = [job for job in found if ended or state is not None or not job.state.over]
        waits = not as_json and any(job.state.waits for job in wanted)
        why = {waiting.job: waiting.why for waiting in cluster.overview().waiting} if waits else {}
    if as_json:
        print_json(wanted)
        return
    out = console()
    if wanted:
        out.print(table(wanted, why, time.time()))
    else:
        out.print("no jobs")
    over = Counter(str(job.state) for job in found if job.state.over)
    if len(wanted) < len(found):
        ended_jobs = ", ".join(f"{number} {name}" for name, number in over.items())
        out.print(f"and {ended_jobs}: --all shows them", style="dim")


def table(found: Sequence[JobRecord], why: Mapping[str, str], now: float) -> Table:
    """`why`: the reasons for which jobs wait."""
    columns = ("job", "name", "tenant", "state", "devices", "servers", "step", "loss", "speed", "age", "why")
    rows = [
        (
            job.id,
            job.name,
            tenant,
            str(job.state),
            devices(job),
            servers(job),
            str(job.step),
            loss(job),
            rate(job),
            span(now - job.submitted),
            why.get(job.id, job.reason),
        )
        for job, tenant in zip(found, tenants(found), strict=True)
    ]
    return job_table(columns, rows)

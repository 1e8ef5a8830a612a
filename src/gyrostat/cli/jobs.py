"""`gyrostat jobs`: the jobs of a cluster as a table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, console, loss, print_json, rate, servers, span
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
    if as_json:
        print_json(wanted)
        return
    out = console()
    if wanted:
        out.print(table(wanted, time.time()))
    else:
        out.print("no jobs")
    over = Counter(str(job.state) for job in found if job.state.over)
    if len(wanted) < len(found):
        ended_jobs = ", ".join(f"{number} {name}" for name, number in over.items())
        out.print(f"and {ended_jobs}: --all shows them", style="dim")


def table(found: Sequence[JobRecord], now: float) -> Table:
    from rich.table import Table

    with_servers = any(job.spec.servers for job in found)
    size = ("devices", "servers") if with_servers else ("devices",)
    rows = Table("job", "name", "tenant", "state", *size, "step", "loss", "speed", "age", "why", box=None)
    for job in found:
        rows.add_row(
            job.id,
            job.name,
            job.tenant if job.vc in ("default", job.tenant) else f"{job.tenant} in {job.vc}",
            str(job.state),
            f"{len(job.devices)} of {job.spec.min}-{job.spec.largest}",
            *((servers(job),) if with_servers else ()),
            str(job.step),
            loss(job),
            rate(job),
            span(now - job.submitted),
            job.reason,
        )
    return rows

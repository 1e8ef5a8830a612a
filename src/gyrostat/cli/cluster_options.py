"""Options and output shared by the verbs of a cluster: its address, a job, JSON or tables, times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyrostat.core.errors import GyrostatError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gyrostat.cluster.records import JobRecord


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Names and ids of the cluster's jobs, for shell completion."""
    from gyrostat.local.client import connect

    try:
        with connect() as cluster:
            jobs = cluster.jobs()
    except GyrostatError:
        return []
    found = {text: str(job.state) for job in jobs for text in (job.name, job.id)}
    return [(text, state) for text, state in found.items() if text.startswith(incomplete)]


Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        show_default=False,
        help="Id or name of the job; of several with one name, the newest.",
        autocompletion=complete_job,
    ),
]
At = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="HOST:PORT",
        show_default="$GYROSTAT_CLUSTER, or the cluster on this machine",
        help="Address of the cluster. The token is read from $GYROSTAT_TOKEN.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, markup=False)


def print_json(value: Any) -> None:
    import msgspec

    print(msgspec.json.encode(value).decode())


def plain(text: str) -> str:
    """Without control characters: the text comes from jobs."""
    return "".join(char if char.isprintable() else "·" for char in text)


def span(seconds: float) -> str:
    """`45 s`, `12 min`, `3.2 h`, `2.5 d`."""
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"


def clock(at: float) -> str:
    """The local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def job_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Without the columns that are empty in all rows. Only reasons, the columns after `why`, are wrapped."""
    from rich.table import Table

    table, wraps = Table(box=None), False
    shown = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    for number in shown:
        wraps = wraps or columns[number] == "why"
        table.add_column(columns[number], no_wrap=not wraps)
    for row in rows:
        table.add_row(*(row[number] for number in shown))
    return table


def tenants(jobs: Sequence[JobRecord]) -> list[str]:
    """A cell for each: the tenant, and its VC if that has another name. Empty if all are the same."""
    names = [job.tenant if job.vc in ("default", job.tenant) else f"{job.tenant} in {job.vc}" for job in jobs]
    return names if len(set(names)) > 1 else [""] * len(names)


def devices(job: JobRecord) -> str:
    """`2 of 1-4`; with a number of borrowed ones, `2 (1*) of 1-4`."""
    smallest, largest = job.spec.min, job.spec.largest
    lent = f" ({len(job.borrowed)}*)" if job.borrowed else ""
    return f"{len(job.devices)}{lent} of {smallest if smallest == largest else f'{smallest}-{largest}'}"


def loss(job: JobRecord) -> str:
    return "" if job.loss is None else f"{job.loss:.4g}"


def servers(job: JobRecord) -> str:
    """Its parameter servers, of those that it should have."""
    return f"{job.servers} of {job.spec.servers}" if job.spec.servers else ""


def rate(job: JobRecord) -> str:
    return "" if job.throughput is None else f"{job.throughput:,.0f}/s"

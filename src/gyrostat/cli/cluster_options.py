"""Options and output shared by the verbs of a cluster: its address, a job, JSON or tables, times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyrostat.core.errors import GyrostatError

if TYPE_CHECKING:
    from rich.console import Console

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


def loss(job: JobRecord) -> str:
    return "" if job.loss is None else f"{job.loss:.4g}"


def servers(job: JobRecord) -> str:
    """Its parameter servers, of those that it should have."""
    return f"{job.servers} of {job.spec.servers}" if job.spec.servers else ""


def rate(job: JobRecord) -> str:
    return "" if job.throughput is None else f"{job.throughput:,.0f}/s"

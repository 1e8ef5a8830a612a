"""`gyrostat logs`: what a job's workers print."""

from __future__ import annotations

from typing import Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, Job, print_json
from gyrostat.cluster.records import LogSource
from gyrostat.local.client import connect

_HELP = "\n\n".join(
    [
        "What the workers of a job print, each line with its worker's number.",
        "  gyrostat logs mnist             (all of it)",
        "  gyrostat logs -f -t 20 mnist    (the last 20 lines, and what follows, until it is over)",
        "  gyrostat logs --source metrics mnist    (what its script gives to job.log, as JSON)",
        "  gyrostat logs --source curves mnist     (its loss and throughput, second by second, as JSON)",
        "With --source host: what the process says that runs the job.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("logs", help=_HELP, short_help="Show what a job's workers print.")(logs)


def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job is over.")] = False,
    tail: Annotated[
        int | None,
        typer.Option("--tail", "-t", metavar="K", min=0, show_default="all", help="Only the last K lines."),
    ] = None,
    source: Annotated[LogSource, typer.Option(help="Which log.")] = LogSource.OUTPUT,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    with connect(at) as cluster:
        for line in cluster.logs(job, source=source, tail=tail, follow=follow):
            if as_json:
                print_json({"line": line})
            else:
                print(line, flush=follow)

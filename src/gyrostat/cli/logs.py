"""`gyrostat logs`: the output of a job's workers."""

from __future__ import annotations

from typing import Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, Job, print_json
from gyrostat.cluster.records import LogSource

_HELP = "\n\n".join(
    [
        "Show the output of a job's workers, each line with its worker's number, and the values of job.log.",
        "  gyrostat logs mnist             (all of it)",
        "  gyrostat logs -f -t 20 mnist    (the last 20 lines and new ones, until the job ends)",
        "  gyrostat logs --source metrics mnist    (the values of job.log, as JSON)",
        "  gyrostat logs --source curves mnist     (loss and throughput per second, as JSON)",
        "With --source host: the output of the process that runs the job.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("logs", help=_HELP)(logs)


def logs(
    job: Job,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Also print new lines, until the job ends.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail", "-t", metavar="K", min=0, show_default="all", help="Number of lines from the end."
        ),
    ] = None,
    source: Annotated[LogSource, typer.Option(help="Log to show.")] = LogSource.OUTPUT,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        for line in cluster.logs(job, source=source, tail=tail, follow=follow):
            if as_json:
                print_json({"line": line})
            else:
                print(line, flush=follow)

"""`gyrostat top`: a live view of a cluster. `top_display` renders it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, console, print_json
from gyrostat.core.errors import ClusterUnreachable

if TYPE_CHECKING:
    from gyrostat.cluster.client import ClusterClient

_HELP = "\n\n".join(
    [
        "Watch the cluster: devices by cell with the job on each, running jobs with throughput and loss, and the queue with "
        "the reason why each job waits.",
        "  gyrostat top            (until Ctrl-C)",
        "  gyrostat top --once     (print the current state)",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("top", help=_HELP)(top)


def top(
    every: Annotated[float, typer.Option(metavar="S", min=0.1, help="Refresh interval in seconds.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the current state and exit; the default without a terminal.")
    ] = False,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    from gyrostat.cli.top_display import render
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        if as_json:
            print_json(cluster.overview())
        elif once or not sys.stdout.isatty():
            console().print(render(cluster.overview()))
        else:
            _watch(cluster, every)


def _watch(cluster: ClusterClient, every: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from gyrostat.cli.top_display import render

    with Live(render(cluster.overview()), console=console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                try:
                    live.update(render(cluster.overview()), refresh=True)
                except ClusterUnreachable as error:
                    live.update(Text(str(error), style="red"), refresh=True)
                time.sleep(every)
        except KeyboardInterrupt:
            return

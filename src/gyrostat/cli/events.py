"""`gyrostat events`: every decision of the scheduler, with its reason."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, complete_job, plain, print_json
from gyrostat.core.plural import plural

if TYPE_CHECKING:
    from gyrostat.cluster.records import EventRecord

_HELP = "\n\n".join(
    [
        "List the decisions of the scheduler and other events, oldest first, each with its reason.",
        "  gyrostat events                 gyrostat events --job mnist",
        "  gyrostat events -f              (and new events as they happen)",
        "  gyrostat events --since 120     (events after number 120)",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("events", help=_HELP)(events)


def events(
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", show_default=False, help="Only events of this job.", autocompletion=complete_job
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", show_default=False, help="Only events of this kind.")
    ] = None,
    since: Annotated[int, typer.Option(metavar="NUMBER", min=0, help="Only events after this number.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Also print new events as they happen.")
    ] = False,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        id_ = None if job is None else cluster.status(job).job.id
        for event in cluster.events(since, follow=follow):
            if id_ not in (None, event.job) or kind not in (None, event.kind):
                continue
            if as_json:
                print_json(event)
            else:
                print(line(event), flush=follow)


def line(event: EventRecord) -> str:
    """`  17  2026-11-16 05:20:11  resized    j3  2 → 4: gains most by them`"""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    change = (
        "" if event.before == event.after else f"{len(event.before)} → {plural(len(event.after), 'device')}: "
    )
    return f"{event.number:>5}  {when}  {event.kind:<10} {event.job or '-':<6} {change}{plain(event.reason)}"

"""`gyrostat cancel`, `pause` and `resume`: requests about a job of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from gyrostat.cli.cluster_options import AsJson, At, Job, print_json

if TYPE_CHECKING:
    from gyrostat.cluster.records import JobRecord

_CANCEL_HELP = "\n\n".join(
    [
        "Cancel a running or queued job of the cluster. Its log and checkpoints are kept for some time (`gyrostat up --keep`).",
        "  gyrostat cancel mnist",
        "To continue it later, use `gyrostat pause mnist` instead.",
    ]
)
_PAUSE_HELP = "\n\n".join(
    [
        "Checkpoint a job of the cluster at its next step boundary, and release its devices until it is resumed.",
        "  gyrostat pause mnist",
        "  gyrostat resume mnist",
        "It continues from the checkpoint; its result keeps its bits.",
    ]
)
_RESUME_HELP = "\n\n".join(
    [
        "Queue a paused job again. It continues from its checkpoint.",
        "  gyrostat resume mnist",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("cancel", help=_CANCEL_HELP)(cancel)
    app.command("pause", help=_PAUSE_HELP)(pause)
    app.command("resume", help=_RESUME_HELP)(resume)


def cancel(job: Job, as_json: AsJson = False, at: At = None) -> None:
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        _print(cluster.cancel(job), "is being cancelled", as_json)


def pause(job: Job, as_json: AsJson = False, at: At = None) -> None:
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        _print(cluster.pause(job), "pauses at its next boundary", as_json)


def resume(job: Job, as_json: AsJson = False, at: At = None) -> None:
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        _print(cluster.resume(job), "is back in the queue", as_json)


def _print(job: JobRecord, what: str, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        print(f"{job.name} ({job.id}) {what}")

"""`gyrostat cancel`, `pause` and `resume`: what owners ask of their jobs."""

from __future__ import annotations

import typer

from gyrostat.cli.cluster_options import AsJson, At, Job, print_json
from gyrostat.cluster.records import JobRecord
from gyrostat.local.client import connect

_CANCEL_HELP = "\n\n".join(
    [
        "End a job of the cluster, whether it runs or waits. Its log and checkpoints are kept for a while.",
        "  gyrostat cancel mnist",
        "To let it go on later instead: `gyrostat pause mnist`.",
    ]
)
_PAUSE_HELP = "\n\n".join(
    [
        "Have a job of the cluster checkpoint at its next boundary and give its devices back, until it is resumed.",
        "  gyrostat pause mnist",
        "  gyrostat resume mnist",
        "It goes on where it was: its result stays the same, bit for bit.",
    ]
)
_RESUME_HELP = "\n\n".join(
    [
        "Put a paused job back into the queue. It goes on from its checkpoint.",
        "  gyrostat resume mnist",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("cancel", help=_CANCEL_HELP, short_help="End a job of the cluster.")(cancel)
    app.command("pause", help=_PAUSE_HELP, short_help="Take a job out of the queue for a while.")(pause)
    app.command("resume", help=_RESUME_HELP, short_help="Put a paused job back into the queue.")(resume)


def cancel(job: Job, as_json: AsJson = False, at: At = None) -> None:
    with connect(at) as cluster:
        _tell(cluster.cancel(job), "is being cancelled", as_json)


def pause(job: Job, as_json: AsJson = False, at: At = None) -> None:
    with connect(at) as cluster:
        _tell(cluster.pause(job), "pauses at its next boundary", as_json)


def resume(job: Job, as_json: AsJson = False, at: At = None) -> None:
    with connect(at) as cluster:
        _tell(cluster.resume(job), "is back in the queue", as_json)


def _tell(job: JobRecord, what: str, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        print(f"{job.name} ({job.id}) {what}")

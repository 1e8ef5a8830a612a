"""`gyrostat status`, `scale` and `migrate`: ask a job that is running on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from gyrostat.core.errors import GyrostatError
from gyrostat.job.door import Answer, Caller, Status, running

Name = Annotated[
    str, typer.Argument(metavar="JOB", help="Its name: see `gyrostat status`.", show_default=False)
]


class NotDone(GyrostatError):
    """The job could not do what it was asked for."""


def register(app: typer.Typer) -> None:
    app.command("status", help="How the jobs running on this machine are.")(status)
    app.command("scale", help=_SCALE_HELP)(scale)
    app.command("migrate", help=_MIGRATE_HELP)(migrate)


_SCALE_HELP = "\n\n".join(
    [
        "Run a job on another number of workers, from its next boundary on.",
        "Newcomers prepare while the others train; the result stays the same, bit for bit. Returns when they train.",
        "  gyrostat scale train 4",
    ]
)
_MIGRATE_HELP = "\n\n".join(
    [
        "Replace workers of a job by new ones, in one switch.",
        "  gyrostat migrate train 0 2   (the numbers are those of `gyrostat status`)",
    ]
)


def status(name: Annotated[str | None, typer.Argument(metavar="[JOB]", show_default=False)] = None) -> None:
    if name is not None:
        with Caller(name) as caller:
            print(_line(caller.status()))
        return
    for other in running():
        try:
            with Caller(other) as caller:
                print(_line(caller.status()))
        except GyrostatError:
            continue  # it has just ended, or was killed


def scale(name: Name, workers: Annotated[int, typer.Argument(metavar="P", help="So many workers.")]) -> None:
    with Caller(name) as caller:
        _tell(caller.scale(workers))


def migrate(
    name: Name, members: Annotated[list[int], typer.Argument(metavar="WORKER…", help="Those that leave.")]
) -> None:
    with Caller(name) as caller:
        _tell(caller.migrate(tuple(members)))


def _tell(answer: Answer) -> None:
    if not answer.done:
        raise NotDone(answer.text)
    print(f"{answer.text} (pause {answer.pause_ms:.0f} ms, prepared in {answer.prepare_ms:.0f} ms)")


def _line(status: Status) -> str:
    parts = [
        f"{status.name}: step {status.step}",
        f"{status.virtual_workers} virtual workers on {status.workers} (workers {', '.join(map(str, status.members))})",
        status.phase,
    ]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.throughput is not None:
        parts.append(f"{status.throughput:,.0f} samples/s")
    return ", ".join(parts)

"""`gyrostat status`, `scale`, `migrate` and `stop`: ask a running job, through an agent on this machine or on another."""

from __future__ import annotations

from typing import Annotated

import typer

from gyrostat.cli.nodes import read_token
from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.job.door import Answer, Caller, Status, running

Name = Annotated[
    str, typer.Argument(metavar="JOB", help="Its name: see `gyrostat status`.", show_default=False)
]


Agent = Annotated[
    str | None,
    typer.Option(
        "--agent",
        metavar="HOST:PORT",
        show_default="one on this machine",
        help="Ask this agent of the job; its token is $GYROSTAT_TOKEN.",
    ),
]


class NotDone(GyrostatError):
    """The job could not do what it was asked for."""


def register(app: typer.Typer) -> None:
    app.command("status", help="How the jobs running on this machine are.")(status)
    app.command("scale", help=_SCALE_HELP)(scale)
    app.command("migrate", help=_MIGRATE_HELP)(migrate)
    app.command("stop", help="Have a job checkpoint at its next boundary, and end.")(stop)


_SCALE_HELP = "\n\n".join(
    [
        "Run a job on another number of workers, from its next boundary on.",
        "Newcomers prepare while the others train; the result stays the same, bit for bit. Returns when they train.",
        "  gyrostat scale train 4",
        "With 0 the job is checkpointed and suspended, until it is given workers again.",
    ]
)
_MIGRATE_HELP = "\n\n".join(
    [
        "Replace workers of a job by new ones, in one switch.",
        "  gyrostat migrate train 0 2   (the numbers are those of `gyrostat status`)",
    ]
)


def status(
    name: Annotated[str | None, typer.Argument(metavar="[JOB]", show_default=False)] = None,
    agent: Agent = None,
) -> None:
    if name is not None:
        with _call(name, agent) as caller:
            print(_line(caller.status()))
        return
    if agent is not None:
        raise UsageError("--agent is for one job: name it")
    lines = {}
    for other in running():
        try:
            with Caller(other) as caller:
                found = caller.status()
                lines[found.name] = _line(found)  # one for all agents of a job
        except GyrostatError:
            continue  # it has just ended, or was killed
    for line in lines.values():
        print(line)


def scale(
    name: Name,
    workers: Annotated[int, typer.Argument(metavar="P", help="So many workers.")],
    agent: Agent = None,
) -> None:
    with _call(name, agent) as caller:
        _tell(caller.scale(workers))


def migrate(
    name: Name,
    members: Annotated[list[int], typer.Argument(metavar="WORKER…", help="Those that leave.")],
    agent: Agent = None,
) -> None:
    with _call(name, agent) as caller:
        _tell(caller.migrate(tuple(members)))


def stop(name: Name, agent: Agent = None) -> None:
    with _call(name, agent) as caller:
        answer = caller.stop()
        if not answer.done:
            raise NotDone(answer.text)
        print(answer.text)


def _call(name: str, agent: str | None) -> Caller:
    if agent is None:
        return Caller(name)
    from gyrostat.job.service import Client

    return Caller(name, via=Client(agent, read_token(None)))


def _tell(answer: Answer) -> None:
    if not answer.done:
        raise NotDone(answer.text)
    print(f"{answer.text} (pause {answer.pause_ms:.0f} ms, prepared in {answer.prepare_ms:.0f} ms)")


def _line(status: Status) -> str:
    parts = [
        f"{status.name}: step {status.step}",
        f"{status.virtual_workers} virtual workers on {status.workers}"
        + (f" (workers {', '.join(map(str, status.members))})" if status.members else ""),
        status.phase,
    ]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.throughput is not None:
        parts.append(f"{status.throughput:,.0f} samples/s")
    return ", ".join(parts)

"""`gyrostat status`, `migrate`, `profile` and `stop`: requests to a running job, through an agent on this or another
machine, or through the cluster that it was submitted to.

A name is looked up among the jobs that `gyrostat run` started on this machine, then in the cluster.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, complete_job, print_json
from gyrostat.core.errors import ClusterUnreachable, GyrostatError, NoSuchJob, UsageError
from gyrostat.core.logs import note
from gyrostat.core.plural import numbered, plural

if TYPE_CHECKING:
    from rich.table import Table

    from gyrostat.cluster.client import ClusterClient
    from gyrostat.cluster.records import JobRecord
    from gyrostat.job.control.client import JobClient
    from gyrostat.job.control.profiling import SizeMeasured
    from gyrostat.job.control.requests import RequestResult, Status

Name = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Name of the job, or its id in the cluster: see `gyrostat status`.",
        show_default=False,
        autocompletion=complete_job,
    ),
]


Agent = Annotated[
    str | None,
    typer.Option(
        "--agent",
        metavar="HOST:PORT",
        show_default="one on this machine",
        help="Address of an agent of the job. The token is read from $GYROSTAT_TOKEN.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("status", help=_STATUS_HELP)(status)
    app.command("migrate", help=_MIGRATE_HELP)(migrate)
    app.command("profile", help=_PROFILE_HELP)(profile)
    app.command("stop", help="Checkpoint a running job at its next step boundary, and end it.")(stop)


_STATUS_HELP = "\n\n".join(
    [
        "Show the status of jobs: those that `gyrostat run` started on this machine, and those of the cluster.",
        "  gyrostat status          (all, one line each)",
        "  gyrostat status mnist    (one job; if it is queued, why; if it failed, its last lines)",
    ]
)
_MIGRATE_HELP = "\n\n".join(
    [
        "Replace workers of a running job by new ones, all at one step boundary.",
        "  gyrostat migrate train 0 2   (worker numbers as in `gyrostat status`)",
        "  gyrostat migrate mnist       (all workers of a job of the cluster)",
    ]
)
_PROFILE_HELP = "\n\n".join(
    [
        "Measure the throughput of a running job, on its current workers or on a range of sizes.",
        "  gyrostat profile train                    (on its current workers)",
        "  gyrostat profile train --min 2 --max 8    (on 8, 7 … 2 workers, and back to what it had)",
        "The job continues to train, and its result keeps its bits. Efficiency is throughput per worker relative to the best "
        "size (EDL); busy is the share of time in which workers run micro-batches.",
    ]
)


def status(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            show_default="all jobs",
            help="Name of the job, or its id in the cluster.",
            autocompletion=complete_job,
        ),
    ] = None,
    agent: Agent = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    if name is None:
        if agent is not None:
            raise UsageError("--agent needs the name of a job")
        _status_of_all(at, as_json)
        return
    cluster = cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            found = cluster.status(name)
        if as_json:
            print_json(found)
        else:
            from gyrostat.cli import status_page

            print("\n".join(status_page.page(found)))
        return
    with call(name, agent) as job_client:
        answer = job_client.status()
    if as_json:
        print_json(answer)
    else:
        print(_line(answer))


def _status_of_all(at: str | None, as_json: bool) -> None:
    from gyrostat.cli import status_page
    from gyrostat.local.client import address, connect
    from gyrostat.local.home import default_home

    alone = _statuses()
    clustered: tuple[JobRecord, ...] = ()
    if address(at) is not None:
        try:
            with connect(at) as cluster:
                clustered = cluster.jobs(ended=False)
        except ClusterUnreachable as error:
            if at is not None:
                raise
            alone += _statuses(default_home().control_sockets)
            note(f"{error} Those of its jobs that train on are shown; `gyrostat up` takes them over")
    if as_json:
        print_json([*alone, *clustered])
        return
    lines = [*map(_line, alone), *map(status_page.line, clustered)]
    print("\n".join(lines) or "no job is running")


def _statuses(sockets: Path | None = None) -> list[Status]:
    """Of all jobs with a control socket; one entry for all agents of a job."""
    from gyrostat.job.control.client import JobClient
    from gyrostat.job.control.control_socket import running

    found: dict[str, Status] = {}
    for name in running(sockets):
        with suppress(GyrostatError), JobClient(name, at=sockets) as job_client:  # it may just have ended
            status = job_client.status()
            found[status.name] = status
    return list(found.values())


def migrate(
    name: Name,
    members: Annotated[
        list[int] | None,
        typer.Argument(metavar="WORKER…", help="Numbers of the workers to replace.", show_default=False),
    ] = None,
    agent: Agent = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    cluster = cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            done = cluster.migrate(name, tuple(members or ()))
        from gyrostat.job.control.requests import RequestResult

        print_answer(
            RequestResult(True, done.text, done.step, done.workers, done.pause_ms, done.prepare_ms), as_json
        )
        return
    if not members:
        raise UsageError(
            f"name the workers of {name!r} to replace: `gyrostat status {name}` shows their numbers"
        )
    with call(name, agent) as job_client:
        print_answer(job_client.migrate(tuple(members)), as_json)


def stop(name: Name, agent: Agent = None, as_json: AsJson = False) -> None:
    from gyrostat.job.control.client import check

    if (cluster := cluster_of(name, agent, None)) is not None:
        cluster.close()
        raise UsageError(
            f"{name} is a job of the cluster: `gyrostat pause {name}` checkpoints it and releases its devices, "
            f"`gyrostat cancel {name}` ends it"
        )
    with call(name, agent) as job_client:
        answer = check(job_client.stop())
    if as_json:
        print_json(answer)
    else:
        print(answer.text)


def cluster_of(name: str, agent: str | None, at: str | None) -> ClusterClient | None:
    """The cluster that runs this job; None if `gyrostat run` started it."""
    from gyrostat.job.control.control_socket import running
    from gyrostat.local.client import address, connect

    if agent is not None and at is not None:
        raise UsageError(
            "--agent is for a job of `gyrostat run`, --at for a job of a cluster: give one of them"
        )
    if agent is not None or (at is None and (name in running() or address() is None)):
        return None
    cluster = connect(at)
    try:
        cluster.status(name)
    except (NoSuchJob, ClusterUnreachable) as error:
        cluster.close()
        if at is None and (isinstance(error, ClusterUnreachable) or _runs_alone(name)):
            return None
        raise
    except GyrostatError:
        cluster.close()
        raise
    return cluster


def _runs_alone(name: str) -> bool:
    """Whether agents of this job run on this machine."""
    from gyrostat.job.control.control_socket import running

    return any(other.startswith(f"{name}.") for other in running())


def call(name: str, agent: str | None) -> JobClient:
    from gyrostat.job.control.client import JobClient

    if agent is None:
        return JobClient(name)
    from gyrostat.cli.nodes import read_token
    from gyrostat.job.nodes.service import AgentClient

    return JobClient(name, via=AgentClient(agent, read_token(None)))


def profile(
    name: Name,
    smallest: Annotated[
        int | None,
        typer.Option("--min", metavar="P", show_default="its current workers", help="Smallest size."),
    ] = None,
    largest: Annotated[
        int | None,
        typer.Option("--max", metavar="P", show_default="its current workers", help="Largest size."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="K", help="Steps to measure at each size.")] = 20,
    as_json: AsJson = False,
    agent: Agent = None,
    at: At = None,
) -> None:
    cluster = cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            rows = cluster.profile(name, smallest, largest, steps).rows
    else:
        with call(name, agent) as job_client:
            rows = job_client.profile(smallest, largest, steps)
    if as_json:
        print_json(rows)
    else:
        from rich.console import Console

        Console(soft_wrap=True, highlight=False).print(_table(rows))


def _table(rows: tuple[SizeMeasured, ...]) -> Table:
    from rich.table import Table

    table = Table("workers", "samples/s", "efficiency", "step", "busy", box=None)
    for row in rows:
        table.add_row(
            str(row.workers),
            f"{row.throughput:,.1f}",
            "-" if row.efficiency is None else f"{row.efficiency:.0%}",
            f"{1e3 * row.step_seconds:.1f} ms",
            f"{row.busy:.0%}",
        )
    return table


def print_answer(answer: RequestResult, as_json: bool) -> None:
    from gyrostat.job.control.client import check

    check(answer)
    if as_json:
        print_json(answer)
    else:
        print(f"{answer.text} (pause {answer.pause_ms:.0f} ms, prepared in {answer.prepare_ms:.0f} ms)")


def _line(status: Status) -> str:
    members = f" ({numbered('worker', status.members)})" if status.members else ""
    if status.servers is None:
        parts = [
            f"{status.name}: step {status.step}",
            f"{plural(status.virtual_workers, 'virtual worker')} on {status.workers}{members}",
        ]
    else:
        owned = ", ".join(f"{server.name} {server.slots}" for server in status.servers)
        parts = [
            f"{status.name}: update {status.step}",
            f"{plural(status.workers, 'worker')}{members}",
            f"{plural(len(status.servers), 'server')} (slots: {owned or 'none yet'})",
        ]
    parts.append(status.phase)
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.throughput is not None:
        parts.append(f"{status.throughput:,.0f} samples/s")
    if status.nodes:
        parts.append(f"on {', '.join(status.nodes)}, led at {status.leader}")
    return ", ".join(parts)

"""`gyrostat status`, `scale`, `migrate`, `profile` and `stop`: ask a running job, through an agent on this machine or on
another, or through the cluster that it was submitted to.

A name is looked for among the jobs that run on this machine by themselves, then in the cluster.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gyrostat.cli import status_page
from gyrostat.cli.cluster_options import AsJson, At, complete_job, print_json
from gyrostat.cli.nodes import read_token
from gyrostat.cluster.client import ClusterClient
from gyrostat.cluster.records import JobRecord
from gyrostat.core.errors import ClusterUnreachable, GyrostatError, NoSuchJob, UsageError
from gyrostat.core.phase import JobPhase
from gyrostat.job.control.control_socket import JobClient, RequestFailed, RequestResult, Status, running
from gyrostat.job.control.profiling import SizeMeasured
from gyrostat.local.client import address, connect

Name = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Its name, or its id in the cluster: see `gyrostat status`.",
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
        help="Ask this agent of the job; its token is $GYROSTAT_TOKEN.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("status", help=_STATUS_HELP, short_help="How jobs are, and why they wait.")(status)
    # `-1` is no option.
    app.command("scale", help=_SCALE_HELP, context_settings={"ignore_unknown_options": True})(scale)
    app.command("migrate", help=_MIGRATE_HELP)(migrate)
    app.command("profile", help=_PROFILE_HELP)(profile)
    app.command("stop", help="Have a job checkpoint at its next boundary, and end.")(stop)


_STATUS_HELP = "\n\n".join(
    [
        "How jobs are: those that run on this machine by themselves, and those of the cluster.",
        "  gyrostat status          (all, one line each)",
        "  gyrostat status mnist    (one; if it waits, why and what would let it run; if it failed, its last lines)",
    ]
)
_SCALE_HELP = "\n\n".join(
    [
        "Run a job on another number of workers, from its next boundary on.",
        "Newcomers prepare while the others train; the result stays the same, bit for bit. Returns when they train.",
        "  gyrostat scale train 4     (four workers)",
        "  gyrostat scale train +2    (two more)",
        "  gyrostat scale train -1    (one fewer)",
        "With 0 the job is checkpointed and suspended, until it is given workers again.",
        "A job of the cluster is resized by its scheduler as soon as it can be; it also takes a range:",
        "  gyrostat scale mnist 2-6   (from now on two to six devices)",
    ]
)
_MIGRATE_HELP = "\n\n".join(
    [
        "Replace workers of a job by new ones, in one switch.",
        "  gyrostat migrate train 0 2   (the numbers are those of `gyrostat status`)",
        "  gyrostat migrate mnist       (all workers of a job of the cluster)",
    ]
)
_PROFILE_HELP = "\n\n".join(
    [
        "Measure how fast a running job is, on the workers it has or on a range of sizes.",
        "  gyrostat profile train                    (as it is)",
        "  gyrostat profile train --min 2 --max 8    (on 8, 7 … 2 workers, and back to what it had)",
        "It trains on meanwhile, and its result stays the same, bit for bit. Efficiency is throughput per worker, relative to "
        "the size at which that is best (EDL); busy is the share of time for which workers ran micro-batches.",
    ]
)


def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[JOB]", show_default=False, autocompletion=complete_job)
    ] = None,
    agent: Agent = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    if name is None:
        if agent is not None:
            raise UsageError("--agent is for one job: name it")
        _status_of_all(at, as_json)
        return
    cluster = _cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            found = cluster.status(name)
        if as_json:
            print_json(found)
        else:
            print("\n".join(status_page.page(found)))
        return
    with _call(name, agent) as job_client:
        answer = job_client.status()
    if as_json:
        print_json(answer)
    else:
        print(_line(answer))


def _status_of_all(at: str | None, as_json: bool) -> None:
    alone: dict[str, Status] = {}
    for other in running():
        try:
            with JobClient(other) as job_client:
                found = job_client.status()
                alone[found.name] = found  # one for all agents of a job
        except GyrostatError:
            continue  # it has just ended, or was killed
    clustered: tuple[JobRecord, ...] = ()
    if address(at) is not None:
        with suppress(*(() if at else (ClusterUnreachable,))), connect(at) as cluster:
            clustered = cluster.jobs(ended=False)
    if as_json:
        print_json([*alone.values(), *clustered])
        return
    for line in [*map(_line, alone.values()), *map(status_page.line, clustered)]:
        print(line)


def scale(
    name: Name,
    workers: Annotated[
        str, typer.Argument(metavar="P", help="So many workers; +2: two more; -1: one fewer.")
    ],
    without: Annotated[
        str | None, typer.Option(metavar="WORKER,…", help="With -K: which ones leave.", show_default=False)
    ] = None,
    agent: Agent = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    match = re.fullmatch(r"([+-]?\d+)|(\d+)-(\d+)", workers)
    if match is None:
        raise UsageError(f"P is a number of workers, such as 4, +2 or -1; got {workers!r}")
    leavers = _members(without)
    if leavers and (match[1] is None or int(workers) != -len(leavers)):
        raise UsageError(
            f"--without {without} names {len(leavers)} workers, so P is -{len(leavers)}; got {workers}"
        )
    cluster = _cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            if leavers:
                raise UsageError(
                    "which workers of a cluster's job leave is the scheduler's choice: leave --without out"
                )
            _scale_in_cluster(cluster, name, match, as_json)
        return
    if match[1] is None:
        raise UsageError(
            f"a range such as {workers} is for jobs of the cluster; a number of workers for {name!r}?"
        )
    with _call(name, agent) as job_client:
        if workers[0] == "+":
            _tell(job_client.scale_out(int(workers)), as_json)
        elif workers[0] == "-":
            _tell(job_client.scale_in(-int(workers), leavers), as_json)
        else:
            _tell(job_client.scale(int(workers)), as_json)


def _scale_in_cluster(cluster: ClusterClient, name: str, wanted: re.Match[str], as_json: bool) -> None:
    job = cluster.status(name).job
    if wanted[1] is None:
        smallest, largest = int(wanted[2]), int(wanted[3])
    else:
        now = len(job.devices) if wanted[1][0] in "+-" else 0
        smallest = largest = now + int(wanted[1])
    if largest < 1:
        raise UsageError(
            f"{job.name} would be left with {largest} devices; to take them all for a while: gyrostat pause {job.name}"
        )
    scaled = cluster.scale(job.id, smallest, largest)
    if as_json:
        print_json(scaled)
    else:
        told = smallest if smallest == largest else f"{smallest} to {largest}"
        print(f"{scaled.name} ({scaled.id}) runs on {told} devices as soon as there are so many for it")


def _members(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--without takes numbers of workers as `gyrostat status` shows them, such as 1,3; got {text!r}"
        ) from None


def migrate(
    name: Name,
    members: Annotated[
        list[int] | None, typer.Argument(metavar="WORKER…", help="Those that leave.", show_default=False)
    ] = None,
    agent: Agent = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    cluster = _cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            done = cluster.migrate(name, tuple(members or ()))
        _tell(
            RequestResult(True, done.text, done.step, done.workers, done.pause_ms, done.prepare_ms), as_json
        )
        return
    if not members:
        raise UsageError(
            f"which workers of {name!r} are to leave? `gyrostat status {name}` shows their numbers"
        )
    with _call(name, agent) as job_client:
        _tell(job_client.migrate(tuple(members)), as_json)


def stop(name: Name, agent: Agent = None, as_json: AsJson = False) -> None:
    with _call(name, agent) as job_client:
        answer = job_client.stop()
    if not answer.done:
        raise RequestFailed(answer.text)
    if as_json:
        print_json(answer)
    else:
        print(answer.text)


def _cluster_of(name: str, agent: str | None, at: str | None) -> ClusterClient | None:
    """The cluster that this job is of; None if it is a job by itself."""
    if agent is not None and at is not None:
        raise UsageError("--agent is for a job by itself, --at for one of a cluster: give one of them")
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
    """Whether agents of such a job are on this machine."""
    return any(other.startswith(f"{name}.") for other in running())


def _call(name: str, agent: str | None) -> JobClient:
    if agent is None:
        return JobClient(name)
    from gyrostat.job.nodes.service import AgentClient

    return JobClient(name, via=AgentClient(agent, read_token(None)))


def profile(
    name: Name,
    smallest: Annotated[
        int | None, typer.Option("--min", metavar="P", show_default="the workers it has", help="The fewest.")
    ] = None,
    largest: Annotated[
        int | None, typer.Option("--max", metavar="P", show_default="the workers it has", help="The most.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="K", help="Measure K steps on each size.")] = 20,
    as_json: AsJson = False,
    agent: Agent = None,
    at: At = None,
) -> None:
    cluster = _cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            rows = cluster.profile(name, smallest, largest, steps).rows
    else:
        with _call(name, agent) as job_client:
            rows = job_client.profile(smallest, largest, steps)
    if as_json:
        print_json(rows)
    else:
        Console(soft_wrap=True, highlight=False).print(_table(rows))


def _table(rows: tuple[SizeMeasured, ...]) -> Table:
    table = Table("workers", "samples/s", "efficiency", "step", "busy", box=None)
    for row in rows:
        table.add_row(
            str(row.workers),
            f"{row.throughput:,.1f}",
            f"{row.efficiency:.0%}",
            f"{1e3 * row.step_seconds:.1f} ms",
            f"{row.busy:.0%}",
        )
    return table


def _tell(answer: RequestResult, as_json: bool) -> None:
    if not answer.done:
        raise RequestFailed(answer.text)
    if as_json:
        print_json(answer)
    else:
        print(f"{answer.text} (pause {answer.pause_ms:.0f} ms, prepared in {answer.prepare_ms:.0f} ms)")


def _line(status: Status) -> str:
    parts = [
        f"{status.name}: step {status.step}",
        f"{status.virtual_workers} virtual workers on {status.workers}"
        + (f" (workers {', '.join(map(str, status.members))})" if status.members else ""),
        status.reconfiguration if status.phase is JobPhase.TRAINING else status.phase,
    ]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.throughput is not None:
        parts.append(f"{status.throughput:,.0f} samples/s")
    if status.nodes:
        parts.append(f"on {', '.join(status.nodes)}, led at {status.leader}")
    return ", ".join(parts)

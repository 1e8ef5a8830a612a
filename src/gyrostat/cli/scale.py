"""`gyrostat scale`: another number of workers, devices or parameter servers, of a running job or one of the cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, print_json
from gyrostat.cli.running import Agent, Name, call, cluster_of, print_answer
from gyrostat.core.errors import UsageError
from gyrostat.core.plural import plural, plural_range

if TYPE_CHECKING:
    from gyrostat.cluster.client import ClusterClient

_SCALE_HELP = "\n\n".join(
    [
        "Change the number of workers of a running job at a step boundary.",
        "New workers prepare while the others train; the result keeps its bits. Returns when the new workers train.",
        "  gyrostat scale train 4     (four workers)",
        "  gyrostat scale train +2    (two more)",
        "  gyrostat scale train -1    (one fewer)",
        "A job with parameter servers has two numbers, and each may be relative:",
        "  gyrostat scale train workers=6 servers=3",
        "  gyrostat scale train workers=+2 servers=-1",
        "With 0 the job is checkpointed and suspended until it gets workers again.",
        "The scheduler of a cluster resizes its jobs as soon as devices are free; it also accepts a range:",
        "  gyrostat scale mnist 2-6   (from now on two to six devices)",
    ]
)


@dataclass(frozen=True)
class RoleSizes:
    """The numbers of workers and servers that a user asks for; None: as now."""

    workers: int | None
    servers: int | None
    relative: bool = False


def register(app: typer.Typer) -> None:
    # `-1` is not an option.
    app.command("scale", help=_SCALE_HELP, context_settings={"ignore_unknown_options": True})(scale)


def scale(
    name: Name,
    sizes: Annotated[
        list[str],
        typer.Argument(
            metavar="P | ROLE=P…",
            help="Number of workers; +2: two more; -1: one fewer. Of a job with servers: workers=P, servers=P.",
        ),
    ],
    without: Annotated[
        str | None,
        typer.Option(metavar="WORKER,…", help="With -K: the workers that leave.", show_default=False),
    ] = None,
    agent: Agent = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    if any("=" in size for size in sizes) or len(sizes) > 1:
        if without is not None:
            raise UsageError("--without is for a number of workers: scale JOB -1 --without 3")
        _scale_roles(name, parse_roles(sizes), agent, as_json, at)
        return
    workers = sizes[0]
    match = re.fullmatch(r"([+-]?\d+)|(\d+)-(\d+)", workers)
    if match is None:
        raise UsageError(f"P is a number of workers, such as 4, +2 or -1; got {workers!r}")
    leavers = _members(without)
    if leavers and (match[1] is None or int(workers) != -len(leavers)):
        raise UsageError(
            f"--without {without} names {plural(len(leavers), 'worker')}, so P is -{len(leavers)}; got {workers}"
        )
    cluster = cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            if leavers:
                raise UsageError("the scheduler of a cluster chooses the workers that leave: omit --without")
            _scale_in_cluster(cluster, name, match, as_json)
        return
    if match[1] is None:
        raise UsageError(
            f"a range such as {workers} is for jobs of the cluster; give {name!r} a number of workers"
        )
    with call(name, agent) as job_client:
        if workers[0] == "+":
            print_answer(job_client.scale_out(int(workers)), as_json)
        elif workers[0] == "-":
            print_answer(job_client.scale_in(-int(workers), leavers), as_json)
        else:
            print_answer(job_client.scale(int(workers)), as_json)


def parse_roles(sizes: Sequence[str]) -> RoleSizes:
    """`workers=6`, `servers=+1`: the wanted numbers. All are relative, or none is."""
    found: dict[str, str] = {}
    for size in sizes:
        match = re.fullmatch(r"(workers|servers)=([+-]?\d{1,9})", size)
        if match is None or match[1] in found:
            raise UsageError(
                f"sizes are workers=P and servers=P, with P such as 4, +2 or -1; got {' '.join(sizes)!r}"
            )
        found[match[1]] = match[2]
    signed = {value[0] in "+-" for value in found.values()}
    if len(signed) > 1:
        raise UsageError(f"give both numbers in all, or both as changes such as +2; got {' '.join(sizes)!r}")
    numbers = {role: int(value) for role, value in found.items()}
    return RoleSizes(numbers.get("workers"), numbers.get("servers"), relative=signed == {True})


def _scale_roles(name: str, sizes: RoleSizes, agent: str | None, as_json: bool, at: str | None) -> None:
    cluster = cluster_of(name, agent, at)
    if cluster is not None:
        with cluster:
            _scale_roles_in_cluster(cluster, name, sizes, as_json)
        return
    with call(name, agent) as job_client:
        answer = job_client.scale_roles(sizes.workers, sizes.servers, relative=sizes.relative)
    print_answer(answer, as_json)


def _scale_roles_in_cluster(cluster: ClusterClient, name: str, sizes: RoleSizes, as_json: bool) -> None:
    job = cluster.status(name).job
    if not job.spec.servers:
        raise UsageError(
            f"{job.name} has no parameter servers: it was submitted without --servers; scale it with a number"
        )
    workers, servers = sizes.workers, sizes.servers
    if sizes.relative:
        workers = None if workers is None else len(job.devices) + workers
        servers = None if servers is None else job.spec.servers + servers
    if workers is not None and workers < 1:
        raise UsageError(
            f"{job.name} would have {plural(workers, 'worker')}; to release all devices: gyrostat pause {job.name}"
        )
    if servers is not None and servers < 1:
        raise UsageError(f"{job.name} would have {plural(servers, 'server')}; it needs at least one")
    scaled = cluster.scale(job.id, workers, workers, servers=servers)
    if as_json:
        print_json(scaled)
        return
    parts = [f"{plural(workers, 'worker')} as soon as possible"] if workers is not None else []
    parts += [plural(servers, "server")] if servers is not None else []
    print(f"{scaled.name} ({scaled.id}) gets {' and '.join(parts)}")


def _scale_in_cluster(cluster: ClusterClient, name: str, wanted: re.Match[str], as_json: bool) -> None:
    job = cluster.status(name).job
    if wanted[1] is None:
        smallest, largest = int(wanted[2]), int(wanted[3])
    else:
        now = len(job.devices) if wanted[1][0] in "+-" else 0
        smallest = largest = now + int(wanted[1])
    if largest < 1:
        raise UsageError(
            f"{job.name} would have {plural(largest, 'device')}; to release all of them: gyrostat pause {job.name}"
        )
    scaled = cluster.scale(job.id, smallest, largest)
    if as_json:
        print_json(scaled)
    else:
        size = plural_range(smallest, largest, "device")
        print(f"{scaled.name} ({scaled.id}) gets {size} as soon as possible")


def _members(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--without takes numbers of workers as `gyrostat status` shows them, such as 1,3; got {text!r}"
        ) from None

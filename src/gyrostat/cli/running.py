"""`gyrostat status`, `scale`, `migrate`, `profile` and `stop`: ask a running job, through an agent on this machine or on
another.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from gyrostat.cli.nodes import read_token
from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.job.door import Answer, Caller, NotDone, Status, running
from gyrostat.job.profiling import SizeMeasured

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


def register(app: typer.Typer) -> None:
    app.command("status", help="How the jobs running on this machine are.")(status)
    # `-1` is no option.
    app.command("scale", help=_SCALE_HELP, context_settings={"ignore_unknown_options": True})(scale)
    app.command("migrate", help=_MIGRATE_HELP)(migrate)
    app.command("profile", help=_PROFILE_HELP)(profile)
    app.command("stop", help="Have a job checkpoint at its next boundary, and end.")(stop)


_SCALE_HELP = "\n\n".join(
    [
        "Run a job on another number of workers, from its next boundary on.",
        "Newcomers prepare while the others train; the result stays the same, bit for bit. Returns when they train.",
        "  gyrostat scale train 4     (four workers)",
        "  gyrostat scale train +2    (two more)",
        "  gyrostat scale train -1    (one fewer)",
        "With 0 the job is checkpointed and suspended, until it is given workers again.",
    ]
)
_MIGRATE_HELP = "\n\n".join(
    [
        "Replace workers of a job by new ones, in one switch.",
        "  gyrostat migrate train 0 2   (the numbers are those of `gyrostat status`)",
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
    workers: Annotated[
        str, typer.Argument(metavar="P", help="So many workers; +2: two more; -1: one fewer.")
    ],
    without: Annotated[
        str | None, typer.Option(metavar="WORKER,…", help="With -K: which ones leave.", show_default=False)
    ] = None,
    agent: Agent = None,
) -> None:
    if not re.fullmatch(r"[+-]?\d+", workers):
        raise UsageError(f"P is a number of workers, such as 4, +2 or -1; got {workers!r}")
    leavers = _members(without)
    if leavers and int(workers) != -len(leavers):
        raise UsageError(
            f"--without {without} names {len(leavers)} workers, so P is -{len(leavers)}; got {workers}"
        )
    with _call(name, agent) as caller:
        if workers[0] == "+":
            _tell(caller.scale_out(int(workers)))
        elif workers[0] == "-":
            _tell(caller.scale_in(-int(workers), leavers))
        else:
            _tell(caller.scale(int(workers)))


def _members(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--without takes numbers of workers as `gyrostat status` shows them, such as 1,3; got {text!r}"
        ) from None


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


def profile(
    name: Name,
    smallest: Annotated[
        int | None, typer.Option("--min", metavar="P", show_default="the workers it has", help="The fewest.")
    ] = None,
    largest: Annotated[
        int | None, typer.Option("--max", metavar="P", show_default="the workers it has", help="The most.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="K", help="Measure K steps on each size.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    agent: Agent = None,
) -> None:
    with _call(name, agent) as caller:
        rows = caller.profile(smallest, largest, steps)
    if as_json:
        print(msgspec.json.encode(rows).decode())
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
    if status.nodes:
        parts.append(f"on {', '.join(status.nodes)}, led at {status.leader}")
    return ", ".join(parts)

"""`gyrostat plan`: the fastest split of a job's virtual workers over devices of several types, by its profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyrostat.core.devices import format_counts
from gyrostat.core.errors import UsageError
from gyrostat.core.files import read_text
from gyrostat.core.plural import plural

if TYPE_CHECKING:
    from rich.console import Console

    from gyrostat.core.profile import Profile
    from gyrostat.sched.planner.definition import Definition
    from gyrostat.sched.planner.split import Split

_HELP = "\n\n".join(
    [
        "Split a job's virtual workers over devices of several types so that a step is fastest.",
        "FILE contains measured throughput in the format of gyrostat, VirtualFlow or Gavel (see docs/howto/plan.md).",
        "  gyrostat plan --profile profiles.json --workload bert --devices v100:2,p100:8 --virtual-workers 32",
        "places 32 virtual workers with equal micro-batches. Devices that do not reduce the step time stay unused. Before "
        "a job is defined, --global-batch also chooses micro-batch sizes:",
        "  gyrostat plan --profile profiles.json --workload bert --devices v100:2,p100:8 --global-batch 1024",
        "Without --workload, the command plans every workload in FILE.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("plan", help=_HELP)(plan)


def plan(
    profile: Annotated[Path, typer.Option(metavar="FILE", help="Measured throughput (JSON).")],
    devices: Annotated[
        str, typer.Option(metavar="TYPE:N,…", help="Available devices, such as v100:2,p100:8.")
    ],
    virtual_workers: Annotated[
        int | None,
        typer.Option(
            "--virtual-workers",
            "-n",
            metavar="N",
            min=1,
            show_default=False,
            help="Number of virtual workers of the job.",
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            metavar="B",
            min=1,
            show_default=False,
            help="Define a job with a global batch of B samples, and choose its micro-batches.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="b",
            min=1,
            show_default="the largest that fits all types",
            help="Samples per virtual worker and step.",
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="all in FILE", help="Workload in FILE.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    if (virtual_workers is None) == (global_batch is None):
        raise UsageError(
            "give either --virtual-workers N (a defined job, whose virtual workers are to be placed) or "
            "--global-batch B (a job yet to be defined)"
        )
    if global_batch is not None and batch_size is not None:
        raise UsageError("--global-batch chooses the batch sizes itself; leave out --batch-size")
    from rich.console import Console

    wanted = parse_devices(devices)
    console = Console(soft_wrap=True, highlight=False)
    answers = []
    for known in _chosen(_read(profile), workload, wanted):
        there = {name: count for name, count in wanted.items() if name in known.speeds}
        if len(there) < len(wanted) and not as_json:
            console.print(f"{known.workload} was not measured on {', '.join(set(wanted) - set(there))}")
        if global_batch is not None:
            answers.append(_defined(console, known, there, global_batch, show=not as_json))
        else:
            answers.append(_placed(console, known, there, virtual_workers or 1, batch_size, show=not as_json))
    if as_json:
        print(json.dumps(answers, indent=1))


def parse_devices(text: str) -> dict[str, int]:
    """`v100:2,p100:8`: the number of devices of each type."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        if not name or not number.isdigit() or name in found:
            raise UsageError(
                f"--devices takes each type once with its number, such as v100:2,p100:8; got {text!r}"
            )
        found[name] = int(number)
    return found


def _read(path: Path) -> dict[str, Profile]:
    from gyrostat.sched.planner.tables import profiles_of

    try:
        return profiles_of(json.loads(read_text(path)))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def _chosen(profiles: Mapping[str, Profile], workload: str | None, there: Mapping[str, int]) -> list[Profile]:
    """The requested workload, which must have been measured on all types; or all that were measured on any type."""
    if workload is None:
        found = [known for known in profiles.values() if any(name in known.speeds for name in there)]
        if not found:
            types = sorted({name for known in profiles.values() for name in known.types})
            raise UsageError(
                f"nothing in the profile was measured on {', '.join(there)}; it has {', '.join(types)}"
            )
        return found
    if workload not in profiles:
        raise UsageError(f"the profile has no workload {workload!r}; it has {', '.join(profiles)}")
    for name in there:
        profiles[workload].speed(name)
    return [profiles[workload]]


def _placed(
    console: Console,
    known: Profile,
    there: Mapping[str, int],
    virtual_workers: int,
    batch_size: int | None,
    *,
    show: bool,
) -> dict[str, Any]:
    from gyrostat.sched.planner.split import best_split

    batch = batch_size or min(known.speed(name).largest_batch for name in there)
    found = best_split(known, batch=batch, virtual_workers=virtual_workers, devices=there)
    if found is None:
        raise UsageError(
            f"{known.workload}: micro-batches of {plural(batch, 'sample')} fit on none of {format_counts(there)}"
        )
    alone = {
        name: split.step
        for name, count in there.items()
        if (split := best_split(known, batch=batch, virtual_workers=virtual_workers, devices={name: count}))
    }
    if show:
        rows = [
            (
                share.type,
                f"{share.devices} of {there[share.type]}",
                _runs(share.counts),
                share.most * share.seconds,
            )
            for share in found.shares
        ]
        title = f"{known.workload}, {plural(virtual_workers, 'virtual worker')} of {plural(batch, 'sample')}"
        _show(console, title, rows, "virtual workers each", found, batch * found.throughput, alone)
    return {
        "workload": known.workload,
        "batch_size": batch,
        "counts": {share.type: share.counts for share in found.shares},
        "step_seconds": found.step,
        "exchange_seconds": found.exchange,
        "samples_per_second": batch * found.throughput,
        "waste_micro_batches_per_second": found.waste,
        "alone_step_seconds": alone,
    }


def _defined(
    console: Console, known: Profile, there: Mapping[str, int], global_batch: int, *, show: bool
) -> dict[str, Any]:
    from gyrostat.sched.planner.definition import define

    found = define(known, global_batch=global_batch, devices=there)
    if found is None:
        raise UsageError(
            f"{known.workload}: {global_batch} samples cannot be split over {format_counts(there)} in measured micro-batches; "
            "try a multiple of a power of two"
        )
    alone = {
        name: single.step
        for name, count in there.items()
        if (single := define(known, global_batch=global_batch, devices={name: count}))
    }
    if show:
        rows = [
            (
                part.type,
                f"{part.devices} of {there[part.type]}",
                f"{part.virtual_workers} x {part.batch} samples",
                part.virtual_workers * part.seconds,
            )
            for part in found.parts
        ]
        title = f"{known.workload}, a global batch of {global_batch}"
        _show(console, title, rows, "micro-batches each", found, found.throughput, alone)
    return {
        "workload": known.workload,
        "parts": [asdict(part) for part in found.parts],
        "batch_sizes": found.batch_sizes,
        "step_seconds": found.step,
        "exchange_seconds": found.exchange,
        "samples_per_second": found.throughput,
        "alone_step_seconds": alone,
    }


def _show(
    console: Console,
    title: str,
    rows: list[tuple[str, str, str, float]],
    what: str,
    found: Split | Definition,
    throughput: float,
    alone: Mapping[str, float],
) -> None:
    from rich.table import Table

    table = Table("type", "devices", what, "busy", box=None, title=title, title_justify="left")
    for name, used, load, busy in rows:
        table.add_row(name, used, load, f"{1000 * busy:.1f} ms")
    console.print(table)
    console.print(
        f"step {1000 * found.step:.1f} ms ({1000 * found.exchange:.1f} ms of it exchange), "
        f"{throughput:.1f} samples/s; {_verdict(found.step, len(rows), alone)}"
    )


def _verdict(step: float, types: int, alone: Mapping[str, float]) -> str:
    """Whether a mix of types is faster, and by how much."""
    if not alone:
        return "no type can do it alone"
    name = min(alone, key=lambda each: alone[each])
    if types > 1:
        return f"mixing is {100 * (alone[name] / step - 1):.1f} % faster than {name} alone"
    return f"mixing does not pay: {name} alone" if len(alone) > 1 else f"{name} alone"


def _runs(counts: tuple[int, ...]) -> str:
    """`8`, or `8 or 7` where devices of one type differ."""
    return " or ".join(str(count) for count in sorted(set(counts), reverse=True))

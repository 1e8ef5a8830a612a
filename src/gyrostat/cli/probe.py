"""`gyrostat probe`: checks whether two machines compute the same bits. Runs on each; the second run compares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli import environment
from gyrostat.core.determinism import parse_pool
from gyrostat.core.errors import UsageError
from gyrostat.core.files import check_writable
from gyrostat.core.job import Determinism, TrainingOptions

if TYPE_CHECKING:
    from rich.console import Console

    from gyrostat.core.job import DevicePool
    from gyrostat.engine.numerics.probe.result import ProbeComparison, ProbeResult

_HELP = "\n\n".join(
    [
        "Print digests of many small operators, to check whether two machines compute the same bits.",
        "Run it on a node of each type with the pool of the job, and compare the second result with the first:",
        "  gyrostat probe --pool avx512,avx2 --json fast.json",
        "  gyrostat probe --pool avx512,avx2 --compare fast.json",
        "Without --pool, nothing is pinned and nodes of different types differ.",
        "Exit code: 0; with --compare, 1 if an operator differs.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("probe", help=_HELP)(probe)


def probe(
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE,…",
            show_default="nothing pinned",
            help="Pin the instructions that these device types have in common.",
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(metavar="T", min=1, help="Number of threads; affects the bits.")
    ] = 1,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the digests to FILE.")
    ] = None,
    compare_with: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="FILE", show_default=False, help="Digests of another machine (--json)."
        ),
    ] = None,
) -> None:
    import msgspec

    from gyrostat.engine.numerics.probe.result import compare
    from gyrostat.job.control.report import write_json

    if json is not None:
        check_writable(json, "--json")
    there = None if compare_with is None else _read(compare_with)
    here = _run(None if pool is None else parse_pool(pool, threads=threads), threads)
    if json is not None:
        write_json(json, msgspec.to_builtins(here) | {"families": here.families, "all": here.all})
    comparison = None if there is None else compare(here, there)
    _print(here, comparison)
    if comparison is not None and not comparison.agree:
        raise typer.Exit(1)


def _run(pool: DevicePool | None, threads: int) -> ProbeResult:
    """Pin as a worker does, then run the operators. Imports torch."""
    from gyrostat.engine.numerics import determinism
    from gyrostat.engine.numerics.probe.run import run_probe

    level = Determinism.ELASTIC if pool is None else Determinism.HETEROGENEOUS
    machine = determinism.cpu_type(environment.variables())
    options = TrainingOptions(determinism=level, pool=pool, threads=threads)
    determinism.pin(options)
    determinism.prepare(options)
    return run_probe(pool=pool, type=machine)


def _read(path: Path) -> ProbeResult:
    import msgspec

    from gyrostat.engine.numerics.probe.result import FORMAT, ProbeResult

    try:
        result = msgspec.json.decode(path.read_bytes(), type=ProbeResult)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} was not written by `gyrostat probe --json`: {error}") from error
    if result.format != FORMAT:
        raise UsageError(
            f"{path} has format {result.format}, this version reads {FORMAT}; run `gyrostat probe --json` again"
        )
    return result


def _print(here: ProbeResult, comparison: ProbeComparison | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    pinned = "nothing pinned" if here.pool is None else f"pinned for {', '.join(here.pool)}"
    console.print(
        f"{here.cpu} {here.type or ''}, torch {here.torch}, threads {here.threads}; {pinned}, ATen computes with "
        f"{here.capability}"
    )
    table = Table("family", "operators", "digest", box=None)
    differing = () if comparison is None else (*comparison.differing, *comparison.only_one)
    if comparison is not None:
        table.add_column("compared")
    for family, digest in here.families.items():
        count = sum(name.startswith(f"{family}/") for name in here.operators)
        wrong = sum(name.startswith(f"{family}/") for name in differing)
        table.add_row(family, str(count), digest, f"{wrong} differ" if wrong else "equal")
    table.add_row("all", str(len(here.operators)), here.all)
    console.print(table)
    if comparison is not None:
        _print_comparison(console, comparison, len(here.operators))


def _print_comparison(console: Console, comparison: ProbeComparison, total: int) -> None:
    for setting in comparison.settings:
        console.print(f"note: {setting}")
    for name in comparison.differing:
        console.print(f"differs: {name}")
    for name in comparison.only_one:
        console.print(f"only on one side: {name}")
    if comparison.agree:
        console.print(f"The two agree in all {total} operators.")
    else:
        console.print(
            f"The two do NOT agree: {len(comparison.differing)} of {total} operators differ. A job may not mix them."
        )

"""`gyrostat scan`: the cost of `heterogeneous` determinism for a script, by operator, and whether it may mix types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli import log_options
from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.core import logs
from gyrostat.core.determinism import parse_pool
from gyrostat.core.files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from gyrostat.job.scan.verdict import ScanRow, ScanVerdict

_HELP = "\n\n".join(
    [
        "Measure the cost of heterogeneous determinism for a script, and whether it may mix device types.",
        "Runs some steps under `elastic` and under `heterogeneous` on this machine, in two workers that take turns, and names "
        "the operators and modules that the pinned settings make slower.",
        "Options stand before the script; all arguments after it are passed to the script.",
        "[bold]Examples[/bold]",
        "  gyrostat scan train.py --epochs 1",
        "  gyrostat scan --pool avx512,avx2,sse --json answer.json train.py",
    ]
)
_MIN_SHARE = 0.005
_ROWS = 8


def register(app: typer.Typer) -> None:
    app.command(
        "scan",
        help=_HELP,
        context_settings={"allow_interspersed_args": False},
    )(scan)


def scan(
    script: Script,
    args: Args = None,
    module: Module = False,
    virtual_workers: Annotated[
        int | None,
        typer.Option(
            "--virtual-workers",
            "-n",
            metavar="N",
            show_default="1, or what the script sets",
            help="Number of virtual workers.",
        ),
    ] = None,
    pool: Annotated[
        str, typer.Option(metavar="TYPE,…", help="Device types that the job would mix.")
    ] = "avx512,avx2",
    threads: Annotated[int, typer.Option(metavar="T", min=1, help="Threads per worker.")] = 1,
    steps: Annotated[int, typer.Option(metavar="S", min=1, help="Steps to measure under each level.")] = 60,
    threshold: Annotated[
        float,
        typer.Option(metavar="X", help="Maximum slowdown with which a job may mix types."),
    ] = 1.05,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the result to FILE.")
    ] = None,
    verbose: log_options.Verbose = 0,
    log_format: log_options.Format = None,
) -> None:
    from gyrostat.job.control.report import write_json
    from gyrostat.job.processes.protocol import Program
    from gyrostat.job.processes.start import WorkerForkServer
    from gyrostat.job.scan.scanner import ScanRequest
    from gyrostat.job.scan.scanner import scan as run_scan

    logs.configure(verbose, log_format)
    if json is not None:
        check_writable(json, "--json")
    request = ScanRequest(
        program=Program(name=script, module=module, args=tuple(args or ())),
        pool=parse_pool(pool, threads=threads),
        virtual_workers=virtual_workers,
        steps=steps,
        threshold=threshold,
    )
    request.check()
    with WorkerForkServer() as one, WorkerForkServer() as other:
        verdict = run_scan(request, parents=(one, other))
    _print(verdict, script)
    if json is not None:
        write_json(json, to_json(verdict, script))


def to_json(verdict: ScanVerdict, script: str) -> dict[str, object]:
    """`mix` is for schedulers: `core.job.DeviceMix`."""
    return {"script": script, "reason": verdict.reason, "mix": asdict(verdict.mix), **asdict(verdict)}


def _print(verdict: ScanVerdict, script: str) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{script} on a CPU of type {verdict.cpu_type}: a step computes {verdict.elastic_ms:.2f} ms under elastic, "
        f"{verdict.heterogeneous_ms:.2f} ms under heterogeneous with {', '.join(verdict.pool)}"
    )
    console.print(
        f"slowdown {verdict.slowdown:.3f}× (95 % interval {verdict.low:.3f} to {verdict.high:.3f})\n"
    )
    for title, rows in (("operator", verdict.operators), ("module", verdict.modules)):
        console.print(_table(title, rows))
        console.print()
    console.print(f"May the job mix types? {verdict.reason[:1].upper()}{verdict.reason[1:]}.")


def _table(title: str, rows: Sequence[ScanRow]) -> Table:
    """The most expensive rows first."""
    from rich.table import Table

    table = Table(box=None)
    table.add_column(title, no_wrap=True, max_width=36)
    for heading in ("share", "elastic", "pinned", "ratio", "adds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in [row for row in rows if max(row.share, row.added) >= _MIN_SHARE][:_ROWS]:
        ratio = "–" if row.ratio is None else f"{row.ratio:.2f}×"
        table.add_row(
            row.name,
            f"{row.share:.1%}",
            f"{row.elastic_ms:.2f} ms",
            f"{row.heterogeneous_ms:.2f} ms",
            ratio,
            f"{row.added:+.1%}",
        )
    return table

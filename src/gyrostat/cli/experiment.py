"""`gyrostat experiment`: reproduces experiments of published papers in virtual time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli import environment, log_options
from gyrostat.core import logs
from gyrostat.core.errors import UsageError
from gyrostat.core.files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from gyrostat.sim.experiments.finding import ExperimentFinding

_HELP = "\n\n".join(
    [
        "Run an experiment of a published paper in virtual time, and print the paper's figures beside ours.",
        "  gyrostat experiment virtualflow-3-jobs --data DIR",
        "  gyrostat experiment virtualflow-3-jobs --data DIR --page docs/results.md",
        "  gyrostat experiment --all --data DIR",
        "DIR contains the traces and tables (docs/howto/experiments.md). Without a name, the command lists the experiments.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("experiment", help=_HELP)(experiment)


def experiment(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of the experiment.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Run all experiments.")] = False,
    data: Annotated[
        Path, typer.Option(metavar="DIR", envvar=environment.DATA, help="Directory with traces and tables.")
    ] = Path("data"),
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default="docs/results.md with --all",
            help="Write the results with plots as a section of this page.",
        ),
    ] = None,
    verbose: log_options.Verbose = 0,
    log_format: log_options.Format = None,
) -> None:
    from rich.console import Console

    from gyrostat.sim.experiments.finding import ExperimentContext
    from gyrostat.sim.experiments.page import write_page
    from gyrostat.sim.experiments.registry import EXPERIMENTS, run

    logs.configure(verbose, log_format)
    if every and name is not None:
        raise UsageError(f"give either a name or --all, not both ({name})")
    console = Console(soft_wrap=True, highlight=False)
    if not every and name is None:
        for known, title in EXPERIMENTS.items():
            console.print(f"{known:22} {title}")
        return
    names = list(EXPERIMENTS) if name is None else [name]
    target = Path("docs/results.md") if every and page is None else page
    if target is not None:
        check_writable(target, "--page")
    for number, each in enumerate(names, start=1):
        began = time.monotonic()
        with console.status(each) as status:

            def show(text: str, label: str = f"[{number}/{len(names)}] {each}") -> None:
                status.update(f"{label}: {text}")

            finding = run(each, ExperimentContext(data=data, progress=show))
        _print(console, finding, time.monotonic() - began)
        if target is not None:
            write_page([finding], target)
            console.print(f"written to {target}")


def _print(console: Console, finding: ExperimentFinding, took: float) -> None:
    from rich.table import Table

    console.print(f"\n[bold]{finding.title}[/bold] ({took:.1f} s)")
    compared = Table("figure", "paper", "ours", "", box=None)
    for each in finding.compared:
        verdict = "" if each.reached is None else "reached" if each.reached else "NOT REACHED"
        compared.add_row(each.figure, each.paper, each.ours, verdict)
    console.print(compared)
    for table in finding.tables:
        shown = Table(*table.columns, box=None, title=table.title, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)

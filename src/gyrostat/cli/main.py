"""`gyrostat`: the entry point of the command line. `verbs` lists the verbs.

An error that gyrostat raises itself is printed as one line and sets the exit code.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import gyrostat
from gyrostat.cli.verbs import VerbGroup
from gyrostat.core import logs
from gyrostat.core.errors import GyrostatError

_HELP = "\n\n".join(
    [
        "Elastic PyTorch training with the bits of plain DDP on N fixed workers.",
        "A job has N virtual workers, which decide its result, and P workers (processes), which only decide "
        "its speed:",
        "  [bold]gyrostat run --virtual-workers 4 --workers 2 train.py --epochs 3[/bold]",
        "computes, bit for bit, what plain DDP computes with 4 processes.",
    ]
)


def build_app() -> typer.Typer:
    """The command line with all verbs."""
    app = typer.Typer(
        name="gyrostat",
        cls=VerbGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=_HELP)(_gyrostat)
    return app


def _show_version(requested: bool) -> None:
    if requested:
        print(f"gyrostat {gyrostat.__version__}")
        raise typer.Exit


def _gyrostat(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    try:
        build_app()(prog_name="gyrostat")
    except GyrostatError as error:
        logs.error(str(error))
        sys.exit(error.exit_code)

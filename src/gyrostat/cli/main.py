"""`gyrostat`: the verbs and what they have in common. Errors that gyrostat itself raises end as one line and
an exit code.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import gyrostat
from gyrostat.cli import (
    cells,
    chaos,
    checkpoint,
    down,
    events,
    experiment,
    jobs,
    later,
    logs,
    plan,
    probe,
    profile_device,
    replay,
    reserve,
    run,
    running,
    scan,
    simulate,
    steer,
    submit,
    token,
    top,
    up,
    verify,
)
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

app = typer.Typer(
    name="gyrostat",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
run.register(app)
up.register(app)
down.register(app)
submit.register(app)
jobs.register(app)
running.register(app)
logs.register(app)
steer.register(app)
top.register(app)
events.register(app)
reserve.register(app)
replay.register(app)
verify.register(app)
scan.register(app)
chaos.register(app)
probe.register(app)
plan.register(app)
profile_device.register(app)
simulate.register(app)
experiment.register(app)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(cells.app, name="cells")
app.add_typer(token.app, name="token")
later.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gyrostat {gyrostat.__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    try:
        app(prog_name="gyrostat")
    except GyrostatError as error:
        print(f"gyrostat: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

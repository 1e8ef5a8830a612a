"""`gyrostat`: the verbs and what they have in common. Errors that gyrostat itself raises end as one line and
an exit code.

A command needs one verb, so only the module that has it is imported; all of them take a second. Help and shell completion
look at all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated

import typer

import gyrostat
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

_MODULES: Mapping[str, Sequence[str]] = {
    "run": ("run",),
    "up": ("up",),
    "down": ("down",),
    "submit": ("submit",),
    "jobs": ("jobs",),
    "running": ("status", "scale", "migrate", "profile", "stop"),
    "logs": ("logs",),
    "steer": ("cancel", "pause", "resume"),
    "top": ("top",),
    "events": ("events",),
    "reserve": ("reserve", "release"),
    "replay": ("replay",),
    "verify": ("verify",),
    "scan": ("scan",),
    "chaos": ("chaos",),
    "probe": ("probe",),
    "plan": ("plan",),
    "profile_device": ("profile-device",),
    "simulate": ("simulate",),
    "experiment": ("experiment",),
    "checkpoint": ("checkpoint",),
    "cells": ("cells",),
    "token": ("token",),
}
"""The modules of this room that have verbs, in the order in which help shows them."""


def build_app(verb: str | None = None) -> typer.Typer:
    """The command line: with all verbs, or with those of the module that has this one."""
    app = typer.Typer(
        name="gyrostat",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=_HELP)(_about)
    wanted = [module for module, verbs in _MODULES.items() if verb in verbs]
    for module in wanted or [*_MODULES, "later"]:
        import_module(f"gyrostat.cli.{module}").register(app)
    return app


def __getattr__(name: str) -> typer.Typer:
    """`app`, with all verbs, for who wants to call them from Python."""
    if name == "app":
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gyrostat {gyrostat.__version__}")
        raise typer.Exit


def _about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    completing = any(name.startswith("_GYROSTAT_COMPLETE") for name in os.environ)
    verb = None if completing or len(sys.argv) < 2 else sys.argv[1]
    try:
        build_app(verb)(prog_name="gyrostat")
    except GyrostatError as error:
        print(f"gyrostat: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

"""The verbs of later versions: they are known, and say so."""

from __future__ import annotations

from collections.abc import Callable

import typer

from gyrostat.core.errors import NotYet

VERBS = {
    "operator": "run the Kubernetes operator",
    "extender": "run the Kubernetes scheduler extender",
}


def register(app: typer.Typer) -> None:
    for verb, meaning in VERBS.items():
        app.command(
            verb,
            help=f"(later) {meaning}",
            hidden=True,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_not_yet(verb, meaning))


def _not_yet(verb: str, meaning: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        raise NotYet(
            f"`gyrostat {verb}` ({meaning}) comes in a later version; "
            "this one runs single jobs: see `gyrostat run --help`"
        )

    return command

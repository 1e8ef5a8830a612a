"""The verbs of later versions: they exist and say that they are not implemented."""

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
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_not_yet(verb, meaning))


def _not_yet(verb: str, meaning: str) -> Callable[[], None]:
    def command() -> None:
        raise NotYet(
            f"`gyrostat {verb}` ({meaning}) comes in a later version; this version runs jobs on one machine, on several "
            "nodes and in a cluster on one machine: see `gyrostat --help`"
        )

    return command

"""`-v` and `--log-format`: the options of every verb that runs for a while. `core.logs` applies them."""

from __future__ import annotations

from typing import Annotated

import typer

from gyrostat.core.logs import LogFormat

_PANEL = "Logging"

Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Log state changes (INFO) to stderr; -vv: also details (DEBUG).",
        rich_help_panel=_PANEL,
    ),
]
Format = Annotated[
    LogFormat | None,
    typer.Option(
        "--log-format",
        show_default="text",
        help="Format of log records and messages.",
        rich_help_panel=_PANEL,
    ),
]

"""The arguments of every verb that runs a script."""

from __future__ import annotations

from typing import Annotated

import typer

Script = Annotated[str, typer.Argument(metavar="SCRIPT", show_default=False, help="The training script.")]
Args = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", show_default=False, help="Arguments of the script.")
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module name, as with python -m.")]

"""What every verb that runs a script takes: the script, and all that is its own."""

from __future__ import annotations

from typing import Annotated

import typer

Script = Annotated[str, typer.Argument(metavar="SCRIPT", show_default=False, help="The training script.")]
Args = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", show_default=False, help="Its own arguments.")
]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as with python -m.")
]

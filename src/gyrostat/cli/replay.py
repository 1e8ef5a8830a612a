"""`gyrostat replay`: would the scheduler decide again what it decided?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, print_json
from gyrostat.local.client import connect
from gyrostat.sched.recording import Replayed

_HELP = "\n\n".join(
    [
        "Have the scheduler decide again, on what it saw, and compare: actions, devices, order, reasons, times.",
        "  gyrostat replay                  (the running cluster, since its daemon started)",
        "  gyrostat replay ticks.jsonl      (a recording: of a cluster, or of `gyrostat simulate --record`)",
        "  gyrostat replay --save FILE      (keep the running cluster's recording as well)",
        "Nothing of the cluster is needed for it but the recording. Exit code 1 if a plan differs.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("replay", help=_HELP, short_help="Have the scheduler decide again what it decided.")(replay)


def replay(
    recording: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", show_default="the running cluster's", help="A recording of ticks."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Write the running cluster's recording there."),
    ] = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    if recording is not None:
        found = decide_again(recording)
    else:
        with connect(at) as cluster:
            content = cluster.recording()
        with tempfile.TemporaryDirectory(prefix="gyrostat-replay-") as directory:
            path = save or Path(directory) / "ticks.jsonl"
            path.write_bytes(content)
            found = decide_again(path)
    tell(found, as_json)


def decide_again(recording: Path) -> Replayed:
    """Build the scheduler that the recording names, and hand it what was seen."""
    from gyrostat.sched.recording import replay as run
    from gyrostat.sim.setup import read_setup

    return run(recording, lambda setup: read_setup(setup).books())


def tell(found: Replayed, as_json: bool = False) -> None:
    """Raises `typer.Exit` if a plan differs."""
    if as_json:
        print_json(found)
    elif found.difference is None:
        print(f"{found.ticks} ticks with {found.actions} actions: all plans equal")
    else:
        print(f"tick {found.difference.tick} at {found.difference.now} s is decided otherwise")
        print(f"  recorded  {found.difference.recorded}")
        print(f"  replayed  {found.difference.replayed}")
    if found.difference is not None:
        raise typer.Exit(1)

"""`gyrostat reserve` and `release`: the door for a serving load that needs devices of the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, print_json
from gyrostat.cluster.api.messages import LONGEST_WAIT_S, Reservations
from gyrostat.core.devices import told
from gyrostat.core.errors import UsageError
from gyrostat.local.client import connect

_RESERVE_HELP = "\n\n".join(
    [
        "Have devices of the cluster for something else, such as a serving load. Jobs shrink or leave for it gracefully, and "
        "keep their bits.",
        "  gyrostat reserve cpu 2     (two from now on, in all; returns when they are free)",
        "  gyrostat reserve           (what is reserved)",
        "  gyrostat release cpu       (all of them back)",
        "Exit code 1 if they are not free in time; they stay reserved, and become free as jobs leave. For operators.",
    ]
)
_RELEASE_HELP = "\n\n".join(
    ["Give reserved devices back to the cluster's jobs.", "  gyrostat release cpu    gyrostat release"]
)
Type = Annotated[str | None, typer.Argument(metavar="[TYPE]", show_default=False, help="Of devices.")]


def register(app: typer.Typer) -> None:
    app.command("reserve", help=_RESERVE_HELP, short_help="Have devices for a serving load.")(reserve)
    app.command("release", help=_RELEASE_HELP, short_help="Give reserved devices back.")(release)


def reserve(
    type_: Type = None,
    devices: Annotated[
        int | None, typer.Argument(metavar="[N]", min=0, show_default=False, help="So many in all.")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(metavar="S", min=0, max=LONGEST_WAIT_S, help="Wait so long until they are free."),
    ] = 30.0,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    with connect(at) as cluster:
        if type_ is None:
            _tell(cluster.reservations(), as_json)
            return
        if devices is None:
            raise UsageError(f"how many? `gyrostat reserve {type_} 2`")
        found = cluster.reserve(type_, devices, wait)
    _tell(found, as_json)
    if not found.free:
        raise typer.Exit(1)


def release(type_: Type = None, as_json: AsJson = False, at: At = None) -> None:
    with connect(at) as cluster:
        for name in cluster.reservations().devices if type_ is None else [type_]:
            cluster.reserve(name, 0)
        _tell(cluster.reservations(), as_json)


def _tell(found: Reservations, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print(f"reserved: {told(found.devices)}" + ("" if found.free else ", not all free yet"))

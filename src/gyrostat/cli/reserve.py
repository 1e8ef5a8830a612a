"""`gyrostat reserve` and `release`: devices of the cluster for a serving load."""

from __future__ import annotations

from typing import Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, print_json
from gyrostat.cluster.api.messages import LONGEST_WAIT_S, Reservations
from gyrostat.core.errors import UsageError

_RESERVE_HELP = "\n\n".join(
    [
        "Reserve devices of the cluster for another load, such as serving. Jobs shrink or checkpoint for it, and keep "
        "their bits.",
        "  gyrostat reserve cpu 2     (two devices in total; returns when they are free)",
        "  gyrostat reserve           (show the reservations)",
        "  gyrostat release cpu       (return all of them)",
        "Exit code: 1 if they are not free in time; they stay reserved and become free as jobs leave. For operators.",
    ]
)
_RELEASE_HELP = "\n\n".join(
    ["Return reserved devices to the jobs of the cluster.", "  gyrostat release cpu    gyrostat release"]
)
Type = Annotated[str | None, typer.Argument(metavar="[TYPE]", show_default=False, help="Device type.")]


def register(app: typer.Typer) -> None:
    app.command("reserve", help=_RESERVE_HELP)(reserve)
    app.command("release", help=_RELEASE_HELP)(release)


def reserve(
    type_: Type = None,
    devices: Annotated[
        int | None,
        typer.Argument(metavar="[N]", min=0, show_default=False, help="Number of reserved devices in total."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="S", min=0, max=LONGEST_WAIT_S, help="Maximum time to wait until they are free."
        ),
    ] = 30.0,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        if type_ is None:
            _print(cluster.reservations(), as_json)
            return
        if devices is None:
            raise UsageError(f"give the number of devices: `gyrostat reserve {type_} 2`")
        found = cluster.reserve(type_, devices, wait)
    _print(found, as_json)
    if not found.free:
        raise typer.Exit(1)


def release(type_: Type = None, as_json: AsJson = False, at: At = None) -> None:
    from gyrostat.local.client import connect

    with connect(at) as cluster:
        for name in cluster.reservations().devices if type_ is None else [type_]:
            cluster.reserve(name, 0)
        _print(cluster.reservations(), as_json)


def _print(found: Reservations, as_json: bool) -> None:
    from gyrostat.core.devices import format_counts

    if as_json:
        print_json(found)
    else:
        print(f"reserved: {format_counts(found.devices)}" + ("" if found.free else ", not all free yet"))

"""The output of `gyrostat up`: a live view on a terminal, elsewhere one line per event."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gyrostat.cluster.records import DeviceRecord, EventRecord, JobRecord

if TYPE_CHECKING:
    from gyrostat.local.daemon import Daemon

_REFRESH_S = 0.5
_EVENTS = 8
_ENDED = 5


def watch(daemon: Daemon) -> None:
    """Returns when the cluster ends."""
    if not sys.stdout.isatty():
        _print_events(daemon)
        return
    with Live(console=Console(), refresh_per_second=4, transient=True) as live:
        while not daemon.wait(_REFRESH_S):
            live.update(
                view(daemon.service.devices(), daemon.service.jobs(None), daemon.registry.recent(_EVENTS))
            )


def _print_events(daemon: Daemon) -> None:
    seen = daemon.registry.last_event
    ended = False
    while not ended:
        ended = daemon.wait(_REFRESH_S)
        for event in daemon.service.events(None, since=seen):
            print(line(event), flush=True)
            seen = event.number


def line(event: EventRecord) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    moved = "" if event.before == event.after else f" [{_numbers(event.before)} → {_numbers(event.after)}]"
    return f"{at} {event.job or '-'} {event.kind}: {event.reason}{moved}"


def view(devices: list[DeviceRecord], jobs: list[JobRecord], events: list[EventRecord]) -> Group:
    """Devices, jobs and the last events."""
    slots = Text("devices  ")
    for device in devices:
        who = "serving" if device.reserved else device.job or "·"
        style = (
            "red"
            if device.reserved
            else "dim"
            if device.job is None
            else "yellow"
            if device.borrowed
            else "green"
        )
        slots.append(f" {device.name} ", style="dim")
        slots.append(who, style=style)
    table = Table(box=None, pad_edge=False)
    for column in ("job", "name", "tenant", "state", "devices", "step", "loss", "samples/s", "why"):
        table.add_column(column)
    ended = [job for job in jobs if job.state.over][-_ENDED:]
    for job in [*ended, *(job for job in jobs if not job.state.over)]:
        table.add_row(
            job.id,
            job.name,
            job.tenant,
            str(job.state),
            _numbers(job.devices),
            str(job.step),
            "" if job.loss is None else f"{job.loss:.4g}",
            "" if job.throughput is None else f"{job.throughput:.0f}",
            Text(job.reason, overflow="ellipsis", no_wrap=True),
        )
    return Group(slots, Text(), table, Text(), *(Text(line(event), style="dim") for event in events))


def _numbers(devices: tuple[int, ...]) -> str:
    return ",".join(map(str, devices)) or "-"

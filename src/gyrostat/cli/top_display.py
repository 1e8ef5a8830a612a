"""The page of `gyrostat top`: devices by cell and tenant, jobs, queues and why jobs wait. Pure: an overview in, text out."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gyrostat.cli.cluster_options import clock, devices, job_table, loss, rate, servers, span, tenants
from gyrostat.cluster.api.messages import Device, Overview, Use
from gyrostat.cluster.records import JobRecord
from gyrostat.core.devices import format_counts
from gyrostat.core.plural import plural

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")


def render(found: Overview) -> RenderableType:
    parts: list[RenderableType] = [_head(found)]
    if found.trouble is not None:
        parts.append(Text(f"trouble: {found.trouble}", style="bold red"))
    parts += [Text(), _devices(found)]
    running = [job for job in found.jobs if job.devices]
    if running:
        parts += [Text(), _running(running, found.now)]
    parts += [Text(), _waiting(found)] if len(running) < len(found.jobs) else []
    return Group(*parts)


def _head(found: Overview) -> Text:
    busy = sum(device.use is Use.BUSY for device in found.devices)
    waits = sum(job.state.waits for job in found.jobs)
    text = Text(f"{clock(found.now)}  {busy} of {plural(len(found.devices), 'device')} busy", style="bold")
    text.append(
        f", {sum(bool(job.devices) for job in found.jobs)} running, {waits} waiting", style="not bold"
    )
    if reserved := {type_: number for type_, number in found.reservations.items() if number}:
        text.append(f", {format_counts(reserved)} reserved", style="not bold")
    for state, number in found.ended.items():
        text.append(f", {number} {state}", style="not bold dim")
    return text


def _devices(found: Overview) -> Table:
    """One row per cell; for each device its job, in the colour of the tenant."""
    tenants = sorted({device.tenant for device in found.devices if device.tenant is not None})
    colour = {tenant: _COLOURS[number % len(_COLOURS)] for number, tenant in enumerate(tenants)}
    rows = Table("cell", "type", "devices", box=None)
    ordered = sorted(found.devices, key=lambda device: (device.cell, device.type, device.id))
    for (cell, type_), group in groupby(ordered, key=lambda device: (device.cell, device.type)):
        line = Text()
        for device in group:
            line.append(" ") if line else None
            line.append(_word(device), style=colour.get(device.tenant or "", "dim"))
        rows.add_row(cell, type_, line)
    for tenant in tenants:
        held = sum(device.tenant == tenant for device in found.devices)
        rows.add_row(
            Text(tenant, style=colour[tenant]), "", Text(plural(held, "device"), style=colour[tenant])
        )
    return rows


def _word(device: Device) -> str:
    if device.use is Use.RESERVED:
        return "serving" if device.job is None else f"{device.job}→serving"
    if device.use is Use.FREE:
        return "·"
    return (device.job or "busy") + ("*" if device.borrowed else "")


def _running(jobs: list[JobRecord], now: float) -> Table:
    columns = ("job", "name", "tenant", "state", "devices", "servers", "step", "speed", "loss", "time", "why")
    rows = [
        (
            job.id,
            job.name,
            tenant,
            str(job.state),
            devices(job),
            servers(job),
            str(job.step),
            rate(job),
            loss(job),
            span(job.ran_by(now)),
            job.reason,
        )
        for job, tenant in zip(jobs, tenants(jobs), strict=True)
    ]
    return job_table(columns, rows)


def _waiting(found: Overview) -> Table:
    explained = {waiting.job: waiting for waiting in found.waiting}
    jobs = [job for job in found.jobs if not job.devices]
    columns = ("waiting", "name", "tenant", "position", "since", "why", "what would let it run")
    rows = []
    for job, tenant in zip(jobs, tenants(jobs), strict=True):
        why = explained.get(job.id)
        place, text, helps = ("", f"{job.state}: {job.reason}", "")
        if why is not None:
            place, text, helps = str(why.position or ""), why.why, why.what_helps
        rows.append((job.id, job.name, tenant, place, span(found.now - job.changed), text, helps))
    return job_table(columns, rows)

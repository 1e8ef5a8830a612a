"""All operations of the API: the table that is served and that the OpenAPI document describes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import msgspec

import gyrostat
from gyrostat.cluster.api import messages as m
from gyrostat.cluster.api.operation import Call, NoBody, Operation
from gyrostat.cluster.api.problem import FORBIDDEN, NOT_FOUND, ApiError
from gyrostat.cluster.api.view import PrincipalView, tenant_of
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import DEFAULT_VC, JobRecord, Waiting
from gyrostat.core.errors import NoSuchJob, UsageError

API = "v1"
_EXPLAINED = 50
"""The number of waiting jobs that an overview explains."""
logger = logging.getLogger(__name__)


def about(call: Call) -> m.About:
    return m.About(version=gyrostat.__version__, api=API, trouble=call.service.trouble())


# Jobs.


def submit(call: Call) -> JobRecord:
    spec: JobSpec = call.body
    principal, root = call.principal, None
    if not principal.operator:
        root = principal.root
        if spec.module and root is not None and not principal.modules:
            raise ApiError(
                FORBIDDEN,
                f"this token may not run modules, which are not below {root}; submit a script, or ask the operator for a token "
                "with --modules",
            )
        spec = msgspec.structs.replace(spec, vc=_vc(spec.check(), call))
    return call.service.submit(spec, principal.tenant, root)


def _vc(spec: JobSpec, call: Call) -> str:
    """A virtual cluster that this token may submit to: the one it names, or else the tenant's own, or else the default one."""
    tenant, known = call.principal.tenant, call.service.virtual_clusters()
    allowed = [*(call.principal.vcs or (tenant,)), DEFAULT_VC]
    if spec.vc is not None and spec.vc not in allowed:
        raise ApiError(
            FORBIDDEN, f"this token may not submit to {spec.vc!r}; it may to {', '.join(allowed[:-1])}"
        )
    wanted = [spec.vc] if spec.vc is not None else [name for name in (tenant, *allowed) if name in allowed]
    for name in wanted:
        if name in known:
            return name
    raise UsageError(f"this cluster has no virtual cluster {wanted[0]!r}; ask its operator for one")


def jobs(call: Call) -> m.Jobs:
    query: m.JobsQuery = call.query
    mine = call.service.jobs(tenant_of(call.principal), ended=query.ended)
    view = PrincipalView(call.principal, {record.id for record in mine})
    return m.Jobs(
        jobs=tuple(
            view.job(record)
            for record in mine
            if query.state in (None, record.state) and query.tenant in (None, record.tenant)
        )
    )


def status(call: Call) -> m.JobStatus:
    record = _job(call)
    view = _view(call)
    waiting = call.service.why_waiting(record.id, tenant_of(call.principal)) if record.state.waits else None
    return m.JobStatus(job=view.job(record), waiting=None if waiting is None else view.waiting(waiting))


def cancel(call: Call) -> JobRecord:
    return _view(call).job(call.service.cancel(_job(call).id, tenant_of(call.principal)))


def pause(call: Call) -> JobRecord:
    return _view(call).job(call.service.pause(_job(call).id, tenant_of(call.principal)))


def resume(call: Call) -> JobRecord:
    return _view(call).job(call.service.resume(_job(call).id, tenant_of(call.principal)))


def scale(call: Call) -> JobRecord:
    wanted: m.ScaleBody = call.body
    return _view(call).job(
        call.service.scale(
            _job(call).id,
            tenant_of(call.principal),
            min=wanted.min,
            max=wanted.max,
            servers=wanted.servers,
        )
    )


def migrate(call: Call) -> m.Changed:
    answer = call.service.migrate(_job(call).id, tenant_of(call.principal), call.body.workers)
    return m.Changed(
        text=answer.text,
        step=answer.step,
        workers=answer.workers,
        pause_ms=answer.pause_ms,
        prepare_ms=answer.prepare_ms,
    )


def profile(call: Call) -> m.ProfileResult:
    wanted: m.ProfileBody = call.body
    return m.ProfileResult(
        rows=call.service.profile(
            _job(call).id,
            tenant_of(call.principal),
            smallest=wanted.smallest,
            largest=wanted.largest,
            steps=wanted.steps,
        )
    )


def logs(call: Call) -> m.LogPart:
    query: m.LogsQuery = call.query
    record = _job(call)
    part = call.service.read_log(
        record.id, tenant_of(call.principal), query.source, after=query.after, tail=query.tail
    )
    return m.LogPart(lines=part.lines, next=part.next, over=record.state.over and part.complete)


# The cluster.


def devices(call: Call) -> tuple[m.Device, ...]:
    view = _view(call)
    return tuple(view.device(device) for device in call.service.devices())


def events(call: Call) -> m.Events:
    query: m.EventsQuery = call.query
    looked_at = call.service.events(None, query.since, query.limit)
    view, tenant = _view(call), tenant_of(call.principal)
    return m.Events(
        events=tuple(view.event(event) for event in looked_at if tenant in (None, event.tenant)),
        next=looked_at[-1].number if looked_at else query.since,
    )


def overview(call: Call) -> m.Overview:
    tenant = tenant_of(call.principal)
    mine = call.service.jobs(tenant)
    live = [record for record in mine if not record.state.over]
    view = PrincipalView(call.principal, {record.id for record in mine})
    return m.Overview(
        version=gyrostat.__version__,
        now=time.time(),
        trouble=call.service.trouble(),
        virtual_clusters=tuple(call.service.virtual_clusters())
        if tenant is None
        else tuple(sorted({record.vc for record in mine})),
        reservations=call.service.reservations(),
        devices=tuple(view.device(device) for device in call.service.devices()),
        jobs=tuple(view.job(record) for record in live),
        waiting=tuple(map(view.waiting, _explained(call, live))),
        ended=dict(Counter(str(record.state) for record in mine if record.state.over)),
    )


def _explained(call: Call, live: list[JobRecord]) -> list[Waiting]:
    """The first of every queue, then the second of every queue, and so on."""
    places: Counter[str] = Counter()
    queued: list[tuple[int, JobRecord]] = []
    for record in sorted(live, key=lambda record: (-record.spec.priority, record.number)):
        if record.state.waits:
            places[record.vc] += 1
            queued.append((places[record.vc], record))
    queued.sort(key=lambda placed: placed[0])
    found = []
    for _, record in queued[:_EXPLAINED]:
        try:
            waiting = call.service.why_waiting(record.id, tenant_of(call.principal))
        except NoSuchJob:
            continue  # deleted meanwhile
        if waiting is not None:
            found.append(waiting)
    return found


# For operators.


def reservations(call: Call) -> m.Reservations:
    return _reserved(call)


def reserve(call: Call) -> m.Reservations:
    wanted: m.ReserveBody = call.body
    free = call.service.reserve(wanted.type, wanted.devices, wait=wanted.wait)
    return msgspec.structs.replace(_reserved(call), free=free)


def _reserved(call: Call) -> m.Reservations:
    given = {type_: number for type_, number in call.service.reservations().items() if number}
    left = Counter(device.type for device in call.service.devices() if device.reserved and device.job is None)
    return m.Reservations(devices=given, free=all(left[type_] >= number for type_, number in given.items()))


def recording(call: Call) -> bytes:
    found = call.service.recording()
    if found is None:
        raise ApiError(NOT_FOUND, "nothing has been recorded yet")
    return found


def shutdown(call: Call) -> m.About:
    logger.warning("%s shuts the cluster down", call.principal.tenant)
    call.service.shutdown(checkpoint=call.body.checkpoint)
    return about(call)


# Implementation.


def _job(call: Call) -> JobRecord:
    """By id or name. Another tenant's job does not exist for the requester; the log records the attempt."""
    tenant = tenant_of(call.principal)
    try:
        return call.service.job(call.job, tenant)
    except NoSuchJob:
        if tenant is not None and any(
            call.job in (record.id, record.name) for record in call.service.jobs(None)
        ):
            logger.warning("tenant %s asked for another tenant's job %r", tenant, call.job)
        raise


def _view(call: Call) -> PrincipalView:
    if call.principal.operator:
        return PrincipalView(call.principal, ())
    return PrincipalView(call.principal, {record.id for record in call.service.jobs(call.principal.tenant)})


def _no_new_data(call: Call, answer: Any) -> bool:
    match answer:
        case m.LogPart(lines=lines, over=over):
            return not lines and not over
        case m.Events(next=looked_to):
            return bool(looked_to == call.query.since)  # events of others are skipped, but read
    return False


def _of_a_job(name: str, summary: str, run: Any, answers: Any, body: Any = m.Empty, **more: Any) -> Operation:
    return Operation(
        name=name,
        method="POST",
        path=f"/{API}/jobs/{{job}}/{name}",
        summary=summary,
        run=run,
        answers=answers,
        body=body,
        conflicts=True,
        **more,
    )


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="about",
        method="GET",
        path=f"/{API}",
        summary="Which service this is, and whether it works as it should",
        run=about,
        answers=m.About,
        public=True,
    ),
    Operation(
        name="submit",
        method="POST",
        path=f"/{API}/jobs",
        summary="Submit a job; it is durable when this responds",
        run=submit,
        answers=JobRecord,
        body=JobSpec,
        status=201,
    ),
    Operation(
        name="jobs",
        method="GET",
        path=f"/{API}/jobs",
        summary="All jobs",
        run=jobs,
        answers=m.Jobs,
        query=m.JobsQuery,
    ),
    Operation(
        name="status",
        method="GET",
        path=f"/{API}/jobs/{{job}}",
        summary="One job; if it waits, why, and what would let it run",
        run=status,
        answers=m.JobStatus,
    ),
    Operation(
        name="logs",
        method="GET",
        path=f"/{API}/jobs/{{job}}/logs",
        summary="Its output, part by part",
        run=logs,
        answers=m.LogPart,
        query=m.LogsQuery,
        waits=_no_new_data,
    ),
    _of_a_job("cancel", "End it", cancel, JobRecord),
    _of_a_job("pause", "Checkpoint it, and take it out of the queue", pause, JobRecord),
    _of_a_job("resume", "Put it back into the queue; it continues from its checkpoint", resume, JobRecord),
    _of_a_job(
        "scale",
        "Run it on another number of devices, or with another number of servers",
        scale,
        JobRecord,
        m.ScaleBody,
    ),
    _of_a_job("migrate", "Replace workers by new ones", migrate, m.Changed, m.MigrateBody, slow=True),
    _of_a_job("profile", "Measure it on several sizes", profile, m.ProfileResult, m.ProfileBody, slow=True),
    Operation(
        name="devices",
        method="GET",
        path=f"/{API}/devices",
        summary="All devices, and the jobs on them",
        run=devices,
        answers=tuple[m.Device, ...],
    ),
    Operation(
        name="events",
        method="GET",
        path=f"/{API}/events",
        summary="Decisions and occurrences, with reasons",
        run=events,
        answers=m.Events,
        query=m.EventsQuery,
        waits=_no_new_data,
    ),
    Operation(
        name="overview",
        method="GET",
        path=f"/{API}/overview",
        summary="A summary of devices, jobs and queues",
        run=overview,
        answers=m.Overview,
    ),
    Operation(
        name="reservations",
        method="GET",
        path=f"/{API}/reservations",
        summary="Devices reserved for serving loads",
        run=reservations,
        answers=m.Reservations,
        operator=True,
    ),
    Operation(
        name="reserve",
        method="POST",
        path=f"/{API}/reservations",
        summary="Reserve devices for serving loads; jobs shrink or stop for it",
        run=reserve,
        answers=m.Reservations,
        body=m.ReserveBody,
        operator=True,
        slow=True,
    ),
    Operation(
        name="recording",
        method="GET",
        path=f"/{API}/recording",
        summary="What the scheduler observed and decided since the daemon started",
        run=recording,
        answers=NoBody,
        media_type="application/x-ndjson",
        operator=True,
    ),
    Operation(
        name="shutdown",
        method="POST",
        path=f"/{API}/shutdown",
        summary="End the daemon",
        run=shutdown,
        answers=m.About,
        body=m.ShutdownBody,
        operator=True,
    ),
)

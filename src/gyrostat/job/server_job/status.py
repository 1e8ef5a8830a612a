"""The `Status` of a server job, from its leader's state."""

from __future__ import annotations

import os

from gyrostat.core.phase import JobPhase, ReconfigurationPhase
from gyrostat.job.control.requests import ServerInfo, Status
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.server_job.tally import ServerTally


def server_job_status(
    request: RunRequest,
    phase: JobPhase,
    members: tuple[int, ...],
    tally: ServerTally,
    servers: tuple[ServerInfo, ...],
    *,
    changing: bool,
    settled: bool,
) -> Status:
    """`changing`: workers or servers have yet to come or to go. `settled`: of servers."""
    training, devices = phase is JobPhase.TRAINING, request.device_assignment
    steady = not (training and changing)
    return Status(
        name=request.name or "",
        program=request.program.name,
        pid=os.getpid(),
        virtual_workers=tally.virtual_workers,
        workers=len(members),
        members=members,
        generation=0,
        phase=phase,
        reconfiguration=ReconfigurationPhase.STEADY if steady else ReconfigurationPhase.STARTING_WORKERS,
        step=tally.updates,
        loss=tally.loss,
        throughput=tally.rate() if training else None,
        devices=devices.devices(members) if devices is not None else (),
        servers=servers,
        servers_settled=settled,
    )

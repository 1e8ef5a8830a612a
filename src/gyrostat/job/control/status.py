"""The `Status` of a job, from its leader's state."""

from __future__ import annotations

import os

from gyrostat.core.phase import JobPhase, ReconfigurationPhase
from gyrostat.job.control.attempt import Attempt
from gyrostat.job.control.outcome import Tally
from gyrostat.job.control.requests import Status
from gyrostat.job.control.run_request import RunRequest


def status_of(
    request: RunRequest, phase: JobPhase, attempt: Attempt | None, tally: Tally, step: int
) -> Status:
    generations = attempt.coordinator.generations if attempt is not None else None
    members = generations.members if generations is not None else ()
    devices = request.device_assignment
    return Status(
        name=request.name or "",
        program=request.program.name,
        pid=os.getpid(),
        virtual_workers=tally.virtual_workers,
        workers=len(members),
        members=members,
        generation=generations.current if generations is not None else 0,
        phase=phase,
        reconfiguration=ReconfigurationPhase.STEADY if generations is None else generations.phase,
        step=step,
        loss=tally.steps[-1].loss if tally.steps else None,
        throughput=tally.rate() if generations is not None else None,
        devices=devices.devices(members) if devices is not None else (),
        profiling=attempt is not None and attempt.coordinator.profiling,
    )

"""One attempt of a job: its workers, from their start to the exit of the last one.

A job may be attempted several times, each time from the newest checkpoint: after a failure that is not the script's, and when a
suspended job is resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyrostat.core.job import Assignment
from gyrostat.job.control.coordinator import Coordinator
from gyrostat.job.control.coordinator_record import CoordinatorOptions, CoordinatorRecord
from gyrostat.job.control.generations import Generations
from gyrostat.job.control.instructions import Instruction
from gyrostat.job.control.run_request import FIRST_GENERATION, RunRequest
from gyrostat.job.control.worker_tracker import WorkerTracker
from gyrostat.job.diagnostics.poison import Death
from gyrostat.job.diagnostics.stragglers import Pace
from gyrostat.job.processes.protocol import (
    FromWorker,
    GenerationPrepared,
    PeerLossReported,
    Ready,
    Recovered,
    Started,
    StepReports,
    Switched,
    WorkerId,
    WorkerLeaving,
)


@dataclass
class Attempt:
    number: int
    request: RunRequest
    tracker: WorkerTracker
    coordinator: Coordinator
    complete: bool = False
    """A worker has ended with the result."""

    @staticmethod
    def begin(number: int, request: RunRequest, deaths: list[Death], store: Callable[[int], str]) -> Attempt:
        """`deaths` are shared by all attempts: what kills a worker may kill the next one."""
        placement = request.actual_placement()
        members = tuple(range(placement.workers))
        if request.device_assignment is not None:
            request.device_assignment.begin(len(members))
        generations = Generations(placement.virtual_workers, members, store, placement)
        coordinator = Coordinator(generations, request.changes(), _options(request))
        return Attempt(number, request, _tracker(members, request, deaths), coordinator)

    @staticmethod
    def restore(
        number: int,
        request: RunRequest,
        deaths: list[Death],
        store: Callable[[int], str],
        record: CoordinatorRecord,
    ) -> Attempt:
        """An attempt that another leader has begun."""
        coordinator = Coordinator.restore(record, store, _options(request))
        return Attempt(number, request, _tracker(coordinator.members, request, deaths), coordinator)

    def worker_id(self, member: int) -> WorkerId:
        return WorkerId(self.number, member)

    def assignment(self, member: int, *, joins: bool, traces: Path | None) -> Assignment:
        """The assignment of a worker that is started now."""
        generations, devices = self.coordinator.generations, self.request.device_assignment
        if devices is not None:
            devices.assign(member, generations.next_members)
        return self.request.assignment(
            member, generations.store(FIRST_GENERATION), joins=joins, traces=traces
        )

    def report(self, member: int, message: FromWorker, virtual_workers: int, now: float) -> list[Instruction]:
        """Pass a worker's message to the coordinator. `virtual_workers`: their number if the message does not have it."""
        coordinator = self.coordinator
        match message:
            case Started(compatibility=compatibility, step=step, virtual_workers=number):
                return coordinator.started(compatibility, step, number or virtual_workers, now)
            case StepReports(steps=steps):
                return coordinator.stepped(steps, now)
            case WorkerLeaving():
                self.tracker.leaving(member, now + self.request.failures.grace_s)
                return coordinator.leaves(member, now)
            case Ready(compatibility=compatibility):
                return coordinator.ready(member, compatibility, now)
            case GenerationPrepared(generation=generation):
                return coordinator.prepared(member, generation)
            case Switched(generation=generation, step=step, paused=paused, why_all=why_all):
                return coordinator.switched(member, generation, step, paused, now, why_all)
            case Recovered(generation=generation, placement=placement, again=again, paused=paused):
                return coordinator.recovered(member, generation, placement, again, paused, now)
            case PeerLossReported(generation=generation):
                coordinator.peer_lost(generation, now)
        return []


def _tracker(members: tuple[int, ...], request: RunRequest, deaths: list[Death]) -> WorkerTracker:
    return WorkerTracker(
        list(members),
        checkpoints=request.options.checkpoint is not None,
        deaths=deaths,
        poison_limit=request.failures.poison_limit,
    )


def _options(request: RunRequest) -> CoordinatorOptions:
    assignment = request.device_assignment
    return CoordinatorOptions(
        pace=Pace(request.failures.stragglers),
        recovers=request.options.recovers,
        min_workers=request.failures.min_workers,
        devices=None if assignment is None else lambda: assignment.size,
    )

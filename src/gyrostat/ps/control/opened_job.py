"""`OpenedJob`: what exists once the first worker has brought the job's `StoreSpec` and `DataSpec`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gyrostat.core.errors import UsageError
from gyrostat.ps.checkpoint.checkpoint_files import CheckpointFiles, FoundCheckpoint, check_same_job
from gyrostat.ps.control.server_fleet import ServerFleet
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.control.status import PsStatus
from gyrostat.ps.control.worker_desk import WorkerDesk
from gyrostat.ps.protocol.coordinator import ServerCoordinator, ServerRecovery
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.protocol.step_commits import check_recovery
from gyrostat.ps.store.spec import StoreSpec
from gyrostat.ps.wire.control import OpenJob


@dataclass(frozen=True)
class OpenedJob:
    spec: StoreSpec
    data: DataSpec
    coordinator: ServerCoordinator
    desk: WorkerDesk
    samples_before: int
    """Reported in earlier runs."""

    @staticmethod
    def make(
        message: OpenJob,
        settings: PsSettings,
        files: CheckpointFiles,
        found: FoundCheckpoint,
        processes: int,
    ) -> OpenedJob:
        """`processes`: those of servers that the coordinator waits for."""
        spec, data = message.spec, message.data
        check_recovery(partial=settings.recovery is ServerRecovery.PARTIAL, order=spec.order)
        queues = data.queues(settings.lease_seconds)
        checkpoint = None
        if found.manifest is not None:
            check_same_job(found.manifest, spec, data, files.directory)
            checkpoint = found.manifest.checkpoint
            queues.roll_back(checkpoint.queues, term=1, now=time.monotonic())
        coordinator = ServerCoordinator(
            spec.slots,
            queues,
            settings.recovery,
            servers=processes,
            order=spec.order,
            checkpoint=checkpoint,
            first_checkpoint=files.highest() + 1,
        )
        desk = WorkerDesk(coordinator, data, settings.lease_seconds)
        return OpenedJob(spec, data, coordinator, desk, desk.samples)

    @property
    def batches(self) -> int:
        """Per epoch."""
        return -(-self.data.samples // self.data.batch_size)

    def check_same(self, message: OpenJob) -> None:
        for what, mine, theirs in (
            ("tables and tensors", self.spec, message.spec),
            ("data", self.data, message.data),
        ):
            if mine != theirs:
                raise UsageError(f"this worker has other {what} than the job: {theirs!r}, not {mine!r}")


def status_of(job: OpenedJob | None, fleet: ServerFleet) -> PsStatus:
    if job is None:
        return PsStatus(servers=fleet.status(None))
    queues, slot_map = job.coordinator.queues, job.coordinator.map
    return PsStatus(
        servers=fleet.status(slot_map),
        workers=job.desk.status(time.monotonic()),
        term=slot_map.term,
        version=slot_map.version,
        moving=job.coordinator.moving,
        settled=job.coordinator.settled,
        epoch=queues.epoch,
        todo=queues.todo,
        doing=queues.doing,
        done=queues.done,
        updates=job.desk.updates,
        samples=job.desk.samples - job.samples_before,
        checkpoint=job.coordinator.checkpoint.number,
    )

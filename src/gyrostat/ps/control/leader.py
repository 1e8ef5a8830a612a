"""`PsLeader`: the leader's part of a job with parameter servers. Its owner's loop drives it.

    1. servers and workers connect; what they send arrives in callbacks of the owner's selector
    2. `ServerCoordinator` and `WorkerDesk` decide; the leader sends messages, starts and ends processes, writes manifests
    3. `tick` does what time brings about: checkpoints, servers that are silent, treatment of hot and slow servers

The job is open when the first worker has brought its `StoreSpec`; servers that have come before wait for it.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Mapping

from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.ps.control.checkpoint_files import FORMAT, CheckpointFiles, PsManifest, check_same_job
from gyrostat.ps.control.server_fleet import ServerFleet, ServerGroup, ServerRecord
from gyrostat.ps.control.server_processes import ServerProcesses
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.control.status import PsEvent, PsEventKind, PsObserver, PsStatus
from gyrostat.ps.control.worker_desk import WorkerDesk
from gyrostat.ps.protocol.coordinator import (
    Instruction,
    SendToServer,
    ServerCoordinator,
    StopServer,
    WriteManifest,
)
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.server.process import ServerSettings
from gyrostat.ps.store.spec import StoreSpec
from gyrostat.ps.wire.connection import PsConnection, PsListener
from gyrostat.ps.wire.control import (
    Answered,
    CloseWorker,
    EndServer,
    FromServerProcess,
    JobProgress,
    LinkLost,
    LogMetrics,
    OpenJob,
    OpenStore,
    RequestRefused,
    ServerAddresses,
    ServerLoad,
    ServerProblem,
    ServerReady,
    control_numbers,
    from_server,
    from_worker,
    send_control,
)
from gyrostat.ps.wire.frames import MalformedFrame, PsFrame
from gyrostat.ps.wire.handshake import PeerRole, new_token

logger = logging.getLogger(__name__)

_MOST_FAILED_STARTS = 3


class PsLeader:
    """One job's servers, shard queues and checkpoints."""

    def __init__(self, settings: PsSettings, selector: selectors.BaseSelector, observer: PsObserver) -> None:
        self.token = new_token()
        self.failure: str | None = None
        """Why the job cannot go on; None: it can."""
        self._settings, self._observer = settings, observer
        self._listener = PsListener(
            selector, settings.host, self.token, on_frame=self._heard, on_lost=self._disconnected
        )
        self._processes = ServerProcesses(selector, settings.server_command, self._process_ended)
        self._fleet = ServerFleet()
        self._files = CheckpointFiles(settings.directory, settings.keep)
        self._job: _OpenJob | None = None
        self._checkpoint_at = float("inf")
        self._failed_starts = 0
        self._closed_workers = 0
        self._addresses: Mapping[str, tuple[str, int]] = {}

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.address

    @property
    def finished(self) -> bool:
        """Workers have finished their script, and none is left."""
        return self._closed_workers > 0 and self._job is not None and len(self._job.desk) == 0

    # The owner.

    def begin(self) -> None:
        """Start the servers."""
        for _ in range(self._settings.servers):
            self._start(self._fleet.add(self._settings.cores))

    def tick(self, now: float | None = None) -> None:
        """What time brings about. Call it after every turn of the loop."""
        now = time.monotonic() if now is None else now
        for record in list(self._fleet.records.values()):
            if record.connection is not None and now - record.heard > self._settings.server_timeout:
                self._server_lost(record.name, f"silent for {now - record.heard:.1f} s")
        job = self._job
        if job is None:
            return
        job.desk.tick(now)
        if now >= self._checkpoint_at:
            self._checkpoint_at = now + self._settings.checkpoint_seconds
            self._follow(job.coordinator.checkpoint_due())
        self._after_event()

    def deadline(self) -> float | None:
        """When `tick` has something to do, by the monotonic clock."""
        heard = [record.heard for record in self._fleet.records.values() if record.connection is not None]
        silent = min(heard, default=float("inf")) + self._settings.server_timeout
        soonest = min(silent, self._checkpoint_at)
        return None if soonest == float("inf") else soonest

    def scale(self, servers: int, cores: int | None = None) -> None:
        """Add or remove servers, while training goes on."""
        if not isinstance(servers, int) or servers < 1:
            raise UsageError(f"a job needs at least 1 server, got {servers!r}")
        for _ in range(servers - len(self._fleet.staying())):
            self._start(self._fleet.add(self._settings.cores if cores is None else cores))
        for group in self._fleet.surplus(servers):
            self._leave(group)

    def replace(self, server: str, cores: int | None = None) -> str:
        """Start another server, of these cores, and let this one leave when it has joined. Returns its name."""
        old = self._fleet.find(server)
        records = self._fleet.add(old.cores if cores is None else cores, replaces=server)
        self._start(records)
        return records[0].server

    def rebalance(self) -> None:
        """Even out the slots by the load that was measured."""
        if self._job is not None:
            self._follow(self._job.coordinator.rebalance(self._slot_loads(self._job.spec.slots)))

    def checkpoint(self) -> None:
        """Begin a checkpoint; an event tells when it is valid."""
        if self._job is not None:
            self._follow(self._job.coordinator.checkpoint_due())

    def give_up_worker(self, name: str) -> None:
        """A worker that hangs: what it holds goes to others."""
        if self._job is not None:
            self._job.coordinator.worker_lost(name)
            self._job.desk.retry(time.monotonic())
            self._after_event()

    def status(self) -> PsStatus:
        job = self._job
        queues = job.coordinator.queues if job else None
        slot_map = job.coordinator.map if job else None
        return PsStatus(
            servers=self._fleet.status(slot_map),
            workers=job.desk.status(time.monotonic()) if job else (),
            term=slot_map.term if slot_map else 0,
            version=slot_map.version if slot_map else 0,
            moving=job.coordinator.moving if job else 0,
            settled=job.coordinator.settled if job else False,
            epoch=queues.epoch if queues else 0,
            todo=queues.todo if queues else 0,
            doing=queues.doing if queues else 0,
            done=queues.done if queues else 0,
            updates=self._updates,
            checkpoint=job.coordinator.checkpoint.number if job else 0,
        )

    def close(self) -> None:
        """End all servers."""
        self._listener.close()
        self._processes.close()

    # What arrives.

    def _heard(self, connection: PsConnection, frame: PsFrame) -> None:
        assert connection.peer is not None
        numbers = control_numbers(frame)
        if connection.peer.role is PeerRole.SERVER:
            self._heard_server(connection, connection.peer.name, from_server(numbers))
        else:
            self._heard_worker(connection, connection.peer.name, frame)
        self._after_event()

    def _disconnected(self, connection: PsConnection, reason: str) -> None:
        assert connection.peer is not None
        name = connection.peer.name
        record = self._fleet.records.get(name)
        if connection.peer.role is PeerRole.SERVER:
            if record is not None and record.connection is connection:
                self._server_lost(name, reason)
        elif self._job is not None and self._job.desk.knows(name, connection):
            self._event(PsEventKind.WORKER_LOST, name, reason)
            self._job.desk.lose(name, time.monotonic())
        self._after_event()

    # Workers.

    def _heard_worker(self, connection: PsConnection, name: str, frame: PsFrame) -> None:
        message, now = from_worker(frame.numbers), time.monotonic()
        if isinstance(message, OpenJob):
            self._open(connection, name, message)
            return
        if self._job is None or not self._job.desk.knows(name, connection):
            raise MalformedFrame(f"worker {name!r} sends {type(message).__name__} before OpenJob")
        if isinstance(message, LogMetrics):
            self._event(PsEventKind.LOG, name, numbers=message.metrics)
            return
        self._job.desk.request(name, message, bytes(frame.arrays), now)
        if isinstance(message, CloseWorker):
            self._closed_workers += 1
            self._event(PsEventKind.WORKER_LEFT, name, "its script has finished")
            self._job.desk.lose(name, now)

    def _open(self, connection: PsConnection, name: str, message: OpenJob) -> None:
        try:
            if self._job is None:
                self._job = self._make_job(message.spec, message.data)
                self._checkpoint_at = time.monotonic() + self._settings.checkpoint_seconds
                for record in self._fleet.records.values():
                    self._join(record)
            self._job.check_same(message)
        except GyrostatError as error:
            send_control(connection, RequestRefused(message.number, str(error)))
            return
        self._job.desk.join(name, connection, time.monotonic())
        self._event(PsEventKind.WORKER_JOINED, name)
        progress = JobProgress(self._updates, self._job.coordinator.queues.epoch)
        send_control(connection, Answered(message.number, progress))

    def _make_job(self, spec: StoreSpec, data: DataSpec) -> _OpenJob:
        manifest = self._files.newest() if self._settings.resume else None
        queues = data.queues(self._settings.lease_seconds)
        checkpoint = None
        if manifest is not None:
            check_same_job(manifest, spec, data, self._files.directory)
            checkpoint = manifest.checkpoint
            queues.roll_back(checkpoint.queues, term=1, now=time.monotonic())
        processes = sum(group.cores for group in self._fleet.staying())
        coordinator = ServerCoordinator(
            spec.slots,
            queues,
            self._settings.recovery,
            servers=processes,
            checkpoint=checkpoint,
            first_checkpoint=self._files.highest() + 1,
        )
        return _OpenJob(spec, data, coordinator, WorkerDesk(coordinator, data, self._settings.lease_seconds))

    # Servers.

    def _heard_server(self, connection: PsConnection, name: str, message: FromServerProcess) -> None:
        record = self._fleet.records.get(name)
        if record is None or record.ending:
            return
        record.heard = time.monotonic()
        match message:
            case ServerReady(address=address, pid=pid):
                record.connection, record.address, record.pid = connection, address, pid
                self._failed_starts = 0
                self._join(record)
            case ServerLoad():
                record.measured(message)
            case LinkLost(server=target):
                if self._job is not None and target in self._job.coordinator.map.addresses:
                    self._follow(self._job.coordinator.link_lost(name, target))
            case ServerProblem(reason=reason):
                self._event(PsEventKind.SERVER_PROBLEM, name, reason)
                self.failure = reason
            case _:
                if self._job is not None:
                    self._follow(self._job.coordinator.message(name, message))
                    self._job.desk.retry(record.heard)

    def _join(self, record: ServerRecord) -> None:
        """A process that listens, of a job that is open."""
        job = self._job
        if job is None or record.connection is None or record.address is None or record.joined:
            return
        record.joined = True
        batches = -(-job.data.samples // job.data.batch_size)
        send_control(record.connection, OpenStore(job.spec, batches, str(self._files.directory.resolve())))
        self._event(PsEventKind.SERVER_JOINED, record.name)
        self._follow(job.coordinator.server_joined(record.name, record.address))
        for group in self._fleet.replaced():
            self._leave(group)

    def _leave(self, group: ServerGroup) -> None:
        group.leaving = True
        for record in self._fleet.processes(group.name):
            if record.joined and self._job is not None:
                self._follow(self._job.coordinator.server_leaving(record.name))
            else:
                self._end(record)

    def _end(self, record: ServerRecord) -> None:
        """A process without slots."""
        record.ending = True
        if record.connection is not None:
            send_control(record.connection, EndServer())
        else:
            self._processes.kill(record.name)

    def _process_ended(self, name: str, code: int) -> None:
        record = self._fleet.records.get(name)
        if record is None:
            return
        if record.ending:
            self._fleet.remove(name)
            self._event(PsEventKind.SERVER_LEFT, name)
            return
        how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if record.connection is None:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_FAILED_STARTS:
                self.failure = f"server {name} cannot be started: {how}, {self._failed_starts} times in a row"
        self._server_lost(name, how)
        self._after_event()

    def _server_lost(self, name: str, reason: str) -> None:
        """Its process has ended, or is given up. Another one takes its place."""
        record = self._fleet.records.get(name)
        if record is None:
            return
        self._processes.kill(name)
        if record.connection is not None:
            record.connection.close()
        if record.ending:
            return  # its end is noticed
        self._fleet.remove(name)
        self._event(PsEventKind.SERVER_LOST, name, reason)
        job = self._job
        if job is not None and record.joined:
            term = job.coordinator.queues.term
            self._follow(job.coordinator.server_lost(name, time.monotonic()))
            if job.coordinator.queues.term > term:
                checkpoint = job.coordinator.checkpoint.number
                self._event(PsEventKind.ROLLED_BACK, name, f"to checkpoint {checkpoint}")
            job.desk.retry(time.monotonic())
        group = self._fleet.groups.get(record.server)
        if group is not None and not group.leaving and self.failure is None:
            self._start([self._fleet.add_process(group.name)])

    def _start(self, records: list[ServerRecord]) -> None:
        for record in records:
            self._processes.start(
                ServerSettings(
                    name=record.name,
                    leader=self._listener.address,
                    token=self.token,
                    host=self._settings.host,
                    load_seconds=self._settings.load_seconds,
                )
            )

    # What the coordinator decides.

    def _follow(self, instructions: list[Instruction]) -> None:
        job = self._job
        assert job is not None
        self._send_addresses(job.coordinator)
        for instruction in instructions:
            match instruction:
                case SendToServer(server=name, message=message):
                    record = self._fleet.records.get(name)
                    if record is not None and record.connection is not None:
                        send_control(record.connection, message)
                case WriteManifest(checkpoint=checkpoint):
                    self._files.write(
                        PsManifest(format=FORMAT, spec=job.spec, data=job.data, checkpoint=checkpoint)
                    )
                    self._follow(job.coordinator.manifest_written(checkpoint))
                    self._event(PsEventKind.CHECKPOINT, numbers={"number": checkpoint.number})
                    job.desk.retry(time.monotonic())
                case StopServer(server=name):
                    self._end(self._fleet.records[name])
        job.desk.send_map()

    def _send_addresses(self, coordinator: ServerCoordinator) -> None:
        """Before any instruction that names a server."""
        addresses = coordinator.map.addresses
        if addresses != self._addresses:
            self._addresses = addresses
            for name in addresses:
                record = self._fleet.records.get(name)
                if record is not None and record.connection is not None:
                    send_control(record.connection, ServerAddresses(addresses))

    def _after_event(self) -> None:
        """Somebody may wait for a checkpoint, which may have been given up meanwhile."""
        job = self._job
        if job is not None and job.desk.checkpoint_wanted:
            job.desk.checkpoint_wanted = False
            if job.coordinator.making is None:
                self._follow(job.coordinator.checkpoint_due())

    def _slot_loads(self, slots: int) -> list[float]:
        """By slot, the busy seconds of the last seconds."""
        loads = [0.0] * slots
        for record in self._fleet.records.values():
            if len(record.loads) >= 2:
                first, last = record.loads[0], record.loads[-1]
                for slot, seconds in last.slots.items():
                    loads[slot] = max(0.0, seconds - first.slots.get(slot, seconds))
        return loads

    @property
    def _updates(self) -> int:
        return self._job.desk.updates if self._job is not None else 0

    def _event(
        self, kind: PsEventKind, name: str = "", reason: str = "", numbers: Mapping[str, float] | None = None
    ) -> None:
        logger.info("%s %s %s", kind, name, reason)
        self._observer.ps_event(
            PsEvent(kind=kind, name=name, reason=reason, numbers=numbers or {}, updates=self._updates)
        )


class _OpenJob:
    """What exists once a worker has opened the job."""

    def __init__(
        self, spec: StoreSpec, data: DataSpec, coordinator: ServerCoordinator, desk: WorkerDesk
    ) -> None:
        self.spec, self.data, self.coordinator, self.desk = spec, data, coordinator, desk

    def check_same(self, message: OpenJob) -> None:
        for what, mine, theirs in (
            ("tables and tensors", self.spec, message.spec),
            ("data", self.data, message.data),
        ):
            if mine != theirs:
                raise UsageError(f"this worker has other {what} than the job: {theirs!r}, not {mine!r}")

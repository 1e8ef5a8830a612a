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
from collections.abc import Callable, Mapping

from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.data.shards.messages import Shard
from gyrostat.ps.checkpoint.checkpoint_files import FORMAT, CheckpointFiles, FoundCheckpoint, PsManifest
from gyrostat.ps.control.balance import Remedy, ServerPolicy, StragglerRule
from gyrostat.ps.control.checkpoint_clock import CheckpointClock
from gyrostat.ps.control.opened_job import OpenedJob, status_of
from gyrostat.ps.control.pending import DigestRequest, Done, PendingWork
from gyrostat.ps.control.server_fleet import ServerFleet, ServerRecord
from gyrostat.ps.control.server_manager import ServerManager
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.control.status import PsEvent, PsEventKind, PsObserver, PsStatus
from gyrostat.ps.protocol.checkpoint import PsCheckpoint
from gyrostat.ps.protocol.coordinator import (
    Instruction,
    SendToServer,
    ServerCoordinator,
    StopServer,
    WriteManifest,
)
from gyrostat.ps.wire.connection import PsConnection, PsListener
from gyrostat.ps.wire.control import (
    Answered,
    AskDigest,
    AskProgress,
    CloseWorker,
    FromServerProcess,
    JobProgress,
    LinkLost,
    LogMetrics,
    OpenJob,
    OpenStore,
    RenewShards,
    RequestRefused,
    ServerAddresses,
    ServerLoad,
    ServerProblem,
    ServerReady,
    SlotDigest,
    SlotNotSaved,
    control_numbers,
    from_server,
    from_worker,
    send_control,
)
from gyrostat.ps.wire.frames import MalformedFrame, PsFrame
from gyrostat.ps.wire.handshake import PeerRole, new_token

logger = logging.getLogger(__name__)

_LONGEST_WAIT = 3600.0


class PsLeader:
    """One job's servers, shard queues and checkpoints."""

    def __init__(
        self,
        settings: PsSettings,
        selector: selectors.BaseSelector,
        observer: PsObserver,
        policy: ServerPolicy | None = None,
    ) -> None:
        """`policy`: decides about hot and slow servers; the default is the fixed rule."""
        self.token = new_token()
        self._settings, self._observer = settings, observer
        self._policy = policy or StragglerRule()
        self._treat_at = float("inf")
        self._listener = PsListener(
            selector, settings.host, self.token, on_frame=self._heard, on_lost=self._disconnected
        )
        self.address = self._listener.address
        self._servers = ServerManager(settings, selector, self.token, self)
        self._files = CheckpointFiles(settings.directory, settings.keep)
        self._found = self._files.newest() if settings.resume else FoundCheckpoint(None, None, ())
        self._job: OpenedJob | None = None
        self._schedule = CheckpointClock(settings)
        self._pending = PendingWork()
        self._problem: str | None = None
        self._closed_workers = 0

    @property
    def failure(self) -> str | None:
        """Why the job cannot go on; None: it can."""
        return self._problem or self._servers.failure

    @property
    def finished(self) -> bool:
        """Workers have finished their script, and none is left."""
        return self._closed_workers > 0 and self._job is not None and len(self._job.desk) == 0

    # The owner.

    def begin(self) -> None:
        """Start the servers."""
        self._servers.begin(self.address)

    def tick(self, now: float | None = None) -> None:
        """What time brings about. Call it after every turn of the loop."""
        now = time.monotonic() if now is None else now
        self._servers.check_silent(now)
        job = self._job
        if job is None:
            return
        job.desk.tick(now)
        if self._schedule.due(now, job.desk.updates):
            self._follow(job.coordinator.checkpoint_due())
        if now >= self._treat_at and job.coordinator.settled and self._fleet.complete:
            self._treat(now)
        self._after_event()

    def deadline(self) -> float:
        """When `tick` has something to do, by the monotonic clock."""
        soonest = min(self._servers.deadline, self._schedule.at, self._treat_at)
        return min(soonest, time.monotonic() + _LONGEST_WAIT)  # more than a selector takes may be configured

    def scale(self, servers: int, cores: int | None = None, done: Done | None = None) -> None:
        """Add or remove servers, while training goes on. `done` is called when all slots are in place."""
        if not isinstance(servers, int) or servers < 1:
            raise UsageError(f"a job needs at least 1 server, got {servers!r}")
        for _ in range(servers - len(self._fleet.staying())):
            self._servers.add(self._settings.cores if cores is None else cores)
        for group in self._fleet.surplus(servers):
            self._servers.leave(group)
        if done is not None:
            self._pending.scales.append(done)
            self._after_event()

    def replace(self, server: str, cores: int | None = None) -> str:
        """Start another server, of these cores, and let this one leave when it has joined. Returns its name."""
        old = self._fleet.find(server)
        return self._servers.add(old.cores if cores is None else cores, replaces=server)

    def rebalance(self) -> None:
        """Even out the slots by the load that was measured."""
        job = self._job
        if job is not None:
            self._follow(job.coordinator.rebalance(self._fleet.slot_loads(job.spec.slots)))

    def checkpoint(self, done: Done | None = None) -> None:
        """Begin a checkpoint. `done` is called when one is valid that was begun after this call, or has failed."""
        job = self._job
        if job is None:
            if done is not None:
                done("no worker has opened the job yet: there is nothing to save")
            return
        if done is not None:
            self._pending.checkpoints.add(job.coordinator, done)
        self._follow(job.coordinator.checkpoint_due())

    def digest(self, done: Callable[[str], None]) -> None:
        """The digest of all parameters, as soon as every slot has told its own."""
        self._pending.digests.append(DigestRequest(done))
        self._after_event()

    def give_up_worker(self, name: str) -> None:
        """A worker that hangs, or has ended: what it holds goes to others, and it cannot come back."""
        if self._job is not None:
            self._job.desk.give_up(name, time.monotonic())
            self._after_event()

    def held_by(self, worker: str) -> Shard | None:
        """The shard that a worker holds, or held when it was lost."""
        return self._job.desk.held_by(worker) if self._job is not None else None

    @property
    def resumed_from(self) -> str | None:
        """The manifest that the job begins from."""
        return None if self._found.path is None else str(self._found.path)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why newer checkpoints were not taken."""
        return self._found.refused

    def status(self) -> PsStatus:
        return status_of(self._job, self._fleet)

    def close(self) -> None:
        """End all servers."""
        self._listener.close()
        self._servers.close()

    # What arrives.

    def _heard(self, connection: PsConnection, frame: PsFrame) -> None:
        assert connection.peer is not None
        numbers = control_numbers(frame)
        if connection.peer.role is PeerRole.SERVER:
            self._servers.heard(connection, connection.peer.name, from_server(numbers))
        else:
            self._heard_worker(connection, connection.peer.name, frame)
        self._after_event()

    def _disconnected(self, connection: PsConnection, reason: str) -> None:
        assert connection.peer is not None
        name = connection.peer.name
        if connection.peer.role is PeerRole.SERVER:
            self._servers.disconnected(connection, name, reason)
        elif self._job is not None and self._job.desk.knows(name, connection):
            self._event(PsEventKind.WORKER_LOST, name, reason)
            self._job.desk.lose(name, time.monotonic())
        self._after_event()

    # Workers.

    def _heard_worker(self, connection: PsConnection, name: str, frame: PsFrame) -> None:
        message, now, job = from_worker(frame.numbers), time.monotonic(), self._job
        if isinstance(message, AskProgress):
            send_control(connection, Answered(message.number, self._progress(name)))
            return
        if isinstance(message, OpenJob):
            self._open(connection, name, message)
            return
        if job is None or not job.desk.knows(name, connection):
            raise MalformedFrame(f"worker {name!r} sends {type(message).__name__} before OpenJob")
        if isinstance(message, RenewShards):
            self._fleet.waited(message, now)
        if isinstance(message, LogMetrics):
            self._event(PsEventKind.LOG, name, numbers=message.metrics)
        elif isinstance(message, AskDigest):
            number = message.number
            self.digest(
                lambda found: send_control(connection, Answered(number, self._progress(name), digest=found))
            )
        else:
            job.desk.request(name, message, bytes(frame.arrays), now)
            if isinstance(message, CloseWorker):
                self._closed_workers += 1
                self._event(PsEventKind.WORKER_LEFT, name, "its script has finished")
                job.desk.lose(name, now)

    def _open(self, connection: PsConnection, name: str, message: OpenJob) -> None:
        try:
            if self._job is None:
                processes = sum(group.cores for group in self._fleet.staying())
                self._job = OpenedJob.make(message, self._settings, self._files, self._found, processes)
                self._schedule.begin(time.monotonic(), self._job.desk.updates)
                if self._settings.adjust_seconds > 0:
                    self._treat_at = time.monotonic() + self._settings.adjust_seconds
                for record in list(self._fleet.records.values()):
                    self.server_ready(record)
            self._job.check_same(message)
            self._job.desk.join(name, connection, time.monotonic())
        except GyrostatError as error:
            send_control(connection, RequestRefused(message.number, str(error)))
            return
        self._event(PsEventKind.WORKER_JOINED, name)
        send_control(connection, Answered(message.number, self._progress(name)))

    def _progress(self, name: str) -> JobProgress:
        if self._job is not None:
            return self._job.desk.progress(name)
        manifest = self._found.manifest
        return JobProgress(0, 0 if manifest is None else manifest.checkpoint.epoch)

    # Servers.

    def _treat(self, now: float) -> None:
        """A hot or slow server, if the policy finds one. Then others are left in peace for a while."""
        found = self._policy.decide(self._fleet.observe())
        if found is None:
            self._treat_at = now + self._settings.load_seconds
            return
        self._treat_at = now + self._settings.adjust_seconds
        self._event(PsEventKind.SERVER_TREATED, found.server, found.reason, evidence=found.evidence)
        match found.remedy:
            case Remedy.MOVE_SLOTS:
                self.rebalance()
            case Remedy.MORE_CORES:
                self._servers.grow(found.server)
            case Remedy.REPLACE:
                self.replace(found.server)

    # `ServerEvents`.

    def server_ready(self, record: ServerRecord) -> None:
        job = self._job
        if job is None or record.connection is None or record.address is None or record.joined:
            return
        record.joined = True
        directory = str(self._files.directory.resolve())
        send_control(record.connection, OpenStore(job.spec, job.batches, directory))
        self._event(PsEventKind.SERVER_JOINED, record.name)
        self._follow(job.coordinator.server_joined(record.name, record.address))
        for group in self._fleet.replaced():
            self._servers.leave(group)

    def server_said(self, record: ServerRecord, message: FromServerProcess) -> None:
        job, name = self._job, record.name
        if job is None:
            return
        match message:
            case LinkLost(server=target):
                if target in job.coordinator.map.addresses:
                    self._follow(job.coordinator.link_lost(name, target))
            case SlotNotSaved(checkpoint=number, reason=reason):
                self._checkpoint_failed(number, reason)
            case SlotDigest():
                self._pending.took_digest(message)
            case ServerProblem(reason=reason, fatal=fatal):
                self._event(PsEventKind.SERVER_PROBLEM, name, reason)
                self._problem = reason if fatal else self._problem
            case ServerReady() | ServerLoad():
                pass  # the manager's
            case _:
                self._follow(job.coordinator.message(name, message))
                job.desk.retry(record.heard)

    def server_leaves(self, record: ServerRecord) -> None:
        assert self._job is not None
        self._follow(self._job.coordinator.server_leaving(record.name))

    def server_ended(self, record: ServerRecord, reason: str) -> None:
        job, now = self._job, time.monotonic()
        if not reason:
            self._event(PsEventKind.SERVER_LEFT, record.name)
        else:
            self._event(PsEventKind.SERVER_LOST, record.name, reason)
            if job is not None and record.joined:
                term = job.coordinator.queues.term
                self._follow(job.coordinator.server_lost(record.name, now))
                if job.coordinator.queues.term > term:
                    checkpoint = job.coordinator.checkpoint.number
                    self._event(PsEventKind.ROLLED_BACK, record.name, f"to checkpoint {checkpoint}")
                job.desk.retry(now)
        self._after_event()

    # What the coordinator decides.

    def _follow(self, instructions: list[Instruction]) -> None:
        job = self._job
        assert job is not None
        self._send_addresses(job.coordinator)
        for instruction in instructions:
            match instruction:
                case SendToServer(server=name, message=message):
                    self._servers.send(name, message)
                case WriteManifest(checkpoint=checkpoint):
                    self._write_manifest(job, checkpoint)
                case StopServer(server=name):
                    self._servers.end(name)
        job.desk.send_map()

    def _write_manifest(self, job: OpenedJob, checkpoint: PsCheckpoint) -> None:
        manifest = PsManifest(format=FORMAT, spec=job.spec, data=job.data, checkpoint=checkpoint)
        try:
            self._files.write(manifest)
        except OSError as error:
            self._checkpoint_failed(checkpoint.number, str(error))
            return
        self._follow(job.coordinator.manifest_written(checkpoint))
        numbers = {"number": checkpoint.number, "seconds": self._schedule.taken(time.monotonic())}
        self._event(PsEventKind.CHECKPOINT, reason=str(self._files.path(checkpoint.number)), numbers=numbers)
        self._pending.checkpoints.valid(checkpoint.number)
        job.desk.retry(time.monotonic())

    def _checkpoint_failed(self, number: int, reason: str) -> None:
        """It is tried again soon if somebody waits for it."""
        assert self._job is not None
        if self._job.coordinator.making != number:
            return
        self._follow(self._job.coordinator.checkpoint_failed(number))
        self._event(PsEventKind.CHECKPOINT_FAILED, reason=reason)
        self._pending.checkpoints.failed(reason)
        self._schedule.failed(time.monotonic())

    def _send_addresses(self, coordinator: ServerCoordinator) -> None:
        """Before any instruction that names a server."""
        addresses = coordinator.map.addresses
        if addresses != self._pending.addresses:
            self._pending.addresses = addresses
            for name in addresses:
                self._servers.send(name, ServerAddresses(addresses))

    def _after_event(self) -> None:
        """Begin what others wait for, and tell those whose wish is fulfilled."""
        job = self._job
        if job is None:
            return
        if job.desk.checkpoint_wanted or self._pending.checkpoints:
            job.desk.checkpoint_wanted = False
            if job.coordinator.making is None and self._schedule.may_begin(time.monotonic()):
                self._follow(job.coordinator.checkpoint_due())
        self._schedule.making(job.coordinator.making, time.monotonic())
        for name, message in self._pending.digests_to_ask(job.coordinator):
            self._servers.send(name, message)
        if job.coordinator.settled and self._fleet.complete:
            self._pending.scaled()

    @property
    def _fleet(self) -> ServerFleet:
        return self._servers.fleet

    @property
    def _updates(self) -> int:
        return self._job.desk.updates if self._job is not None else 0

    def _event(
        self,
        kind: PsEventKind,
        name: str = "",
        reason: str = "",
        *,
        numbers: Mapping[str, float] | None = None,
        evidence: tuple[str, ...] = (),
    ) -> None:
        logger.info("%s %s %s", kind, name, reason)
        event = PsEvent(
            kind=kind,
            name=name,
            reason=reason,
            evidence=evidence,
            numbers=numbers or {},
            updates=self._updates,
        )
        self._observer.ps_event(event)

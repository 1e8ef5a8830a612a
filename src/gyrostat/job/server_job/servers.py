"""`PsServers`: the parameter servers of a job, by `gyrostat.ps.control`; implements `port.ServerControl`."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from pathlib import Path

from gyrostat.core.errors import GyrostatError
from gyrostat.core.events import EventKind
from gyrostat.core.roles import ProcessRole
from gyrostat.job.control.requests import ServerInfo
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.server_job.poison import ShardInHand
from gyrostat.job.server_job.port import (
    Done,
    FromServers,
    ServerProgress,
    ServersCheckpointed,
    ServersHappened,
)
from gyrostat.ps.checkpoint.checkpoint_files import CheckpointFiles
from gyrostat.ps.checkpoint.record import clear_records, merge_records
from gyrostat.ps.control.leader import PsLeader
from gyrostat.ps.control.settings import PsSettings
from gyrostat.ps.control.status import PsEvent, PsEventKind

_SECONDS = 60.0
"""Between checkpoints that the user has not asked for: what a lost server costs at most."""


_SERVER_TIMEOUT_S = 10.0
"""All workers wait for a server that does not answer, so it is given up sooner than a worker."""
_NEVER_S = 365 * 86_400.0


class PsServers:
    def __init__(
        self,
        request: RunRequest,
        selector: selectors.BaseSelector,
        directory: Path,
        on_event: Callable[[FromServers], None],
    ) -> None:
        """`directory`: for checkpoints that need not outlive the job, if the user has named no other."""
        assert request.servers is not None
        self._on_event, self._record = on_event, request.servers.record
        self._settings = _settings(request, directory)
        self._leader = PsLeader(self._settings, selector, self)
        if self._record is not None and self._leader.resumed_from is None:
            clear_records(self._settings.directory)
        self._opened = False
        self._shows_checkpoints = request.options.checkpoint is not None

    @property
    def address(self) -> tuple[str, int]:
        return self._leader.address

    @property
    def token(self) -> bytes:
        return self._leader.token

    @property
    def progress(self) -> ServerProgress:
        status = self._leader.status()
        return ServerProgress(status.updates, status.samples, status.epoch, self._opened)

    @property
    def resumed_from(self) -> str | None:
        return self._leader.resumed_from

    @property
    def refused(self) -> Sequence[str]:
        return self._leader.refused

    @property
    def failure(self) -> str | None:
        return self._leader.failure

    @property
    def settled(self) -> bool:
        return self._leader.status().settled

    def begin(self) -> None:
        self._leader.begin()

    def tick(self, now: float) -> None:
        self._leader.tick(now)

    def deadline(self) -> float | None:
        return self._leader.deadline()

    def servers(self) -> tuple[ServerInfo, ...]:
        return tuple(
            ServerInfo(
                name=each.name,
                cores=each.cores,
                slots=each.slots,
                pids=each.pids,
                busy=each.busy,
                memory=each.memory_bytes,
            )
            for each in self._leader.status().servers
            if not each.leaving
        )

    def worker_lost(self, worker: str) -> None:
        self._leader.give_up_worker(worker)

    def held_by(self, worker: str) -> ShardInHand | None:
        shard = self._leader.held_by(worker)
        return None if shard is None else ShardInHand(shard.epoch, shard.start, shard.stop)

    def scale(self, servers: int, done: Done) -> None:
        before = len(self.servers())

        def scaled(problem: str | None) -> None:
            if problem is None:
                self._happened(
                    EventKind.RESIZE,
                    f"{servers} server{'s' * (servers != 1)} instead of {before}",
                    before=before,
                    after=servers,
                )
            done(problem)

        self._leader.scale(servers, done=scaled)

    def checkpoint(self, done: Done) -> None:
        self._leader.checkpoint(done)

    def digest(self, done: Callable[[str], None]) -> None:
        def found(digest: str) -> None:
            if self._record is not None:
                self._write_record(self._record, digest)
            done(digest)

        self._leader.digest(found)

    def _write_record(self, path: Path, digest: str) -> None:
        """The end of the last epoch is in a checkpoint, which says what the servers hold."""
        directory = self._settings.directory
        manifest = CheckpointFiles(directory, self._settings.keep).newest().manifest
        assert manifest is not None
        try:
            merge_records(directory, spec=manifest.spec, data=manifest.data, digest=digest).write(path)
        except (OSError, GyrostatError) as error:
            self._happened(EventKind.FAILURE, f"the order of updates cannot be written to {path}: {error}")

    def close(self) -> None:
        self._leader.close()

    # PsObserver.

    def ps_event(self, event: PsEvent) -> None:
        match event.kind:
            case PsEventKind.SERVER_LOST:
                self._happened(
                    EventKind.FAILURE,
                    f"server {event.name} was lost: {event.reason}",
                    evidence=event.evidence,
                )
            case PsEventKind.ROLLED_BACK:
                self._happened(
                    EventKind.ROLL_BACK,
                    f"parameters and shards went back {event.reason}",
                    recovered_from="checkpoint",
                    evidence=event.evidence,
                )
            case PsEventKind.SERVER_TREATED:
                self._happened(EventKind.STRAGGLER, event.reason, evidence=event.evidence)
            case PsEventKind.SERVER_PROBLEM:
                self._happened(EventKind.FAILURE, f"server {event.name}: {event.reason}")
            case PsEventKind.WORKER_JOINED:
                self._opened = True
            case PsEventKind.CHECKPOINT_FAILED:
                self._happened(EventKind.CHECKPOINT_FAILED, event.reason)
            case PsEventKind.CHECKPOINT if self._shows_checkpoints:
                self._on_event(
                    ServersCheckpointed(path=event.reason, seconds=event.numbers.get("seconds", 0.0))
                )

    def _happened(
        self,
        kind: EventKind,
        reason: str,
        *,
        before: int | None = None,
        after: int | None = None,
        recovered_from: str | None = None,
        evidence: Sequence[str] = (),
    ) -> None:
        self._on_event(
            ServersHappened(
                kind=kind,
                reason=reason,
                role=ProcessRole.SERVER,
                before=before,
                after=after,
                recovered_from=recovered_from,
                evidence=evidence,
            )
        )


def _settings(request: RunRequest, directory: Path) -> PsSettings:
    assert request.servers is not None
    role, policy = request.servers.role, request.options.checkpoint
    if policy is None:
        directory = directory / "servers"
        directory.mkdir()
        return PsSettings(
            servers=role.count,
            cores=role.cores,
            recovery=role.recovery,
            adjust_seconds=role.adjust_s,
            directory=directory,
            checkpoint_seconds=_SECONDS,
            server_timeout=min(_SERVER_TIMEOUT_S, _timeout(request)),
            lease_seconds=_timeout(request),
        )
    Path(policy.directory).mkdir(parents=True, exist_ok=True)
    return PsSettings(
        servers=role.count,
        cores=role.cores,
        recovery=role.recovery,
        adjust_seconds=role.adjust_s,
        directory=Path(policy.directory),
        resume=policy.resume,
        keep=policy.keep,
        checkpoint_seconds=policy.interval_s or _SECONDS,
        checkpoint_updates=policy.every or None,
        server_timeout=min(_SERVER_TIMEOUT_S, _timeout(request)),
        lease_seconds=_timeout(request),
    )


def _timeout(request: RunRequest) -> float:
    """Seconds after which a silent worker is given up."""
    return request.failures.heartbeat_timeout_s or _NEVER_S

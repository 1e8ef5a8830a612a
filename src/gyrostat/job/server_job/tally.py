"""The sums and events of a server job while it runs, and its `Outcome`.

The queues know how many batches and samples are trained, each counted once. Losses are those that workers report, in the order
of arrival, for progress only: a batch that was trained again is reported again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gyrostat.core.events import Event, EventKind
from gyrostat.core.roles import ProcessRole
from gyrostat.job.control.outcome import CheckpointRecord, LogRecord, Outcome
from gyrostat.job.control.worker_tracker import JobFailure
from gyrostat.job.processes.protocol import Logged, StepReport
from gyrostat.job.server_job.port import ScriptLogged, ServerProgress, ServersCheckpointed, ServersHappened

_RATE_WINDOW_S = 5.0


class ServerTally:
    def __init__(self, virtual_workers: int, workers: int, servers: int, asked_at: float) -> None:
        """`asked_at`: the monotonic time of the request."""
        self.virtual_workers, self.workers, self.servers = virtual_workers, workers, servers
        self.steps: list[StepReport] = []
        self.events: list[Event] = []
        self.first: ServerProgress | None = None
        """When it began: what a checkpoint had already."""
        self._asked_at = self._began_at = asked_at
        self._progress, self._moved_at = ServerProgress(), asked_at
        self._logs: list[LogRecord] = []
        self._logged_by: dict[tuple[int, str], int] = {}
        """By step and values: the worker that logged them first."""
        self._checkpoints: list[CheckpointRecord] = []
        self._rates: list[tuple[float, int]] = []

    @property
    def updates(self) -> int:
        return self._progress.updates

    @property
    def loss(self) -> float | None:
        return self.steps[-1].loss if self.steps else None

    def began(self, progress: ServerProgress, now: float) -> None:
        """The first worker trains."""
        if self.first is None:
            self.first, self._began_at = progress, now

    def progressed(self, progress: ServerProgress, now: float) -> bool:
        """The queues report. Returns whether there is anything new."""
        if progress.updates == self._progress.updates and progress.samples == self._progress.samples:
            return False
        self._progress, self._moved_at = progress, now
        self._rates.append((now, progress.samples))
        while len(self._rates) > 2 and now - self._rates[0][0] > _RATE_WINDOW_S:
            self._rates.pop(0)
        return True

    def rate(self) -> float | None:
        """Samples per second of the last few seconds; None after a roll-back within them."""
        if len(self._rates) < 2:
            return None
        (since, before), (until, after) = self._rates[0], self._rates[-1]
        return (after - before) / (until - since) if until > since and after >= before else None

    def renumbered(self, reports: Sequence[StepReport]) -> list[StepReport]:
        """A worker's batches, numbered in the order of arrival over all workers."""
        first = (self.first.updates if self.first is not None else 0) + len(self.steps) + 1
        new = [
            msgspec.structs.replace(report, step=number) for number, report in enumerate(reports, start=first)
        ]
        self.steps += new
        return new

    def logged(self, log: ScriptLogged | Logged, member: int = 0) -> bool:
        """Whether it is new: another worker logs the same again if the main worker has finished before it."""
        if self._logged_by.setdefault((log.step, str(sorted(log.metrics.items()))), member) != member:
            return False
        self._logs.append(LogRecord(step=log.step, metrics=log.metrics))
        return True

    def checkpointed(self, found: ServersCheckpointed, now: float) -> Event:
        self._checkpoints.append(
            CheckpointRecord(step=self.updates, path=found.path, seconds=found.seconds, blocked=0.0)
        )
        return self.note(EventKind.CHECKPOINT, f"wrote {found.path}", now)

    def happened(self, found: ServersHappened, now: float) -> Event:
        return self.note(
            found.kind,
            found.reason,
            now,
            role=found.role,
            before=found.before,
            after=found.after,
            pause_ms=found.pause_ms,
            recovered_from=found.recovered_from,
            evidence=found.evidence,
        )

    def note(
        self,
        kind: EventKind,
        reason: str,
        now: float,
        *,
        role: ProcessRole | None = None,
        before: int | None = None,
        after: int | None = None,
        pause_ms: float | None = None,
        recovered_from: str | None = None,
        evidence: Sequence[str] = (),
    ) -> Event:
        event = Event(
            kind=kind,
            step=self.updates,
            at=now - self._asked_at,
            reason=reason,
            role=role,
            from_workers=before,
            to_workers=after,
            pause_ms=pause_ms,
            recovered_from=recovered_from,
            evidence=tuple(evidence),
        )
        self.events.append(event)
        return event

    def outcome(
        self,
        *,
        now: float,
        exit_codes: Mapping[int, int],
        failure: JobFailure | None = None,
        digest: str | None = None,
        stopped_by: int | None = None,
        stop_requested: bool = False,
        resumed_from: str | None = None,
        refused: Sequence[str] = (),
    ) -> Outcome:
        first = self.first or ServerProgress()
        return Outcome(
            virtual_workers=self.virtual_workers,
            workers=self.workers,
            first_step=first.updates,
            reported_from=first.updates,
            steps=self.updates,
            samples=self._progress.samples - first.samples,
            seconds=max(0.0, self._moved_at - self._began_at),
            total_seconds=now - self._asked_at,
            losses=tuple(step.loss for step in self.steps),
            step_times=tuple(step.at - self._asked_at for step in self.steps),
            digest=digest,
            resumed_from=resumed_from,
            refused=tuple(refused),
            reduction=None,
            checkpoints=tuple(self._checkpoints),
            logs=tuple(self._logs),
            probes=(),
            events=tuple(self.events),
            exit_codes=tuple(code for _, code in sorted(exit_codes.items())),
            failure=failure,
            diverged=None,
            stopped=stopped_by is not None and failure is None,
            stopped_by=stopped_by,
            stop_requested=stop_requested,
            cut=False,
            servers=self.servers,
        )

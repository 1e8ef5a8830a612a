"""The result of a run: `Tally` adds up the workers' reports while it runs, `Outcome` is the final result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gyrostat.core.errors import Diverged, ScriptFailed
from gyrostat.core.events import Event, EventKind
from gyrostat.core.job import ReductionChoice
from gyrostat.core.plural import plural
from gyrostat.job.control.instructions import Reconfiguration, ReconfigurationDone, SurvivorsGoOn
from gyrostat.job.control.worker_tracker import JobFailure
from gyrostat.job.diagnostics.stragglers import Straggler
from gyrostat.job.diagnostics.watchdog import Standstill
from gyrostat.job.processes.protocol import (
    Checkpointed,
    FromWorker,
    Logged,
    NotCheckpointed,
    Probed,
    Started,
    StepReport,
    StepReports,
    WorkerFinished,
)

_RATE_WINDOW_S = 5.0
_REPEATED = 10_000
"""After a recovery, up to this number of last steps may be reported twice."""


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """The metrics of one call of `job.log`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ProbeRecord:
    """Digests of the state after `step` steps, for `verify`."""

    step: int
    digest: str
    tensors: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    step: int
    path: str
    seconds: float
    """Seconds until it was in place."""
    blocked: float
    """Seconds for which training stood still."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run. Times are seconds since it was requested."""

    virtual_workers: int
    workers: int
    first_step: int
    """The step at which it began: 0, or where the checkpoint was taken that it resumed from."""
    reported_from: int
    """The step from which on there are losses, samples, logs and events: `first_step`, or where the last leader of a job on
    several nodes took over."""
    steps: int
    """Steps of the job that are complete, earlier runs included."""
    samples: int
    """Samples of all virtual workers in this run, from step `reported_from` on."""
    seconds: float
    """From the start of training to its last step."""
    total_seconds: float
    """From the request to the exit of the last worker."""
    losses: tuple[float | None, ...]
    """Virtual worker 0's, of every step of this run."""
    step_times: tuple[float, ...]
    """When each of these steps was complete."""
    digest: str | None
    """Of all tracked state at the end; None if the script did not get there, or tracked nothing."""
    resumed_from: str | None
    refused: tuple[str, ...]
    """Checkpoints that could not be used, with reasons."""
    reduction: ReductionChoice | None
    """How gradients were added; None if training did not begin."""
    checkpoints: tuple[CheckpointRecord, ...]
    logs: tuple[LogRecord, ...]
    probes: tuple[ProbeRecord, ...]
    events: tuple[Event, ...]
    exit_codes: tuple[int, ...]
    """Per worker, those included that left or joined; the negated signal if one killed it."""
    failure: JobFailure | None
    diverged: str | None
    """Says so if workers that must be equal ended with different digests."""
    stopped: bool
    """It ended early at a boundary, with a checkpoint."""
    stopped_by: int | None
    """The signal by which the user asked for that."""
    stop_requested: bool
    """The user asked for it by `gyrostat stop`, not by a signal."""
    cut: bool
    """It ended early at the step that the request had named (`stop_after`)."""
    servers: int | None = None
    """Parameter servers at the end; None: the job had none. With servers a step is an update, by one batch."""

    @property
    def began(self) -> bool:
        """Training has begun."""
        return self.reduction is not None or (self.servers is not None and self.steps > self.first_step)

    @property
    def ok(self) -> bool:
        """There is a result: the script has ended, with a digest if it trained, or was cut at the step that the request had
        named."""
        ended = self.stopped_by is None and (self.cut or not (self.stopped or self.trained))
        return self.failure is None and self.diverged is None and (ended or self.digest is not None)

    @property
    def trained(self) -> bool:
        """A worker has begun to train: its script has called gyrostat.init, and reached a loop of the job."""
        return self.steps > self.first_step or self.digest is not None

    @property
    def throughput(self) -> float:
        """Samples of all virtual workers per second of training."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def exit_code(self) -> int:
        """What `gyrostat run` returns for it: 0 if and only if there is a result."""
        if self.ok:
            return 0
        if self.failure is not None:
            return self.failure.exit_code or ScriptFailed.exit_code
        if self.diverged is not None:
            return Diverged.exit_code
        return ScriptFailed.exit_code if self.stopped_by is None else 128 + self.stopped_by

    def check(self) -> Outcome:
        """Itself, if the run succeeded; raises otherwise."""
        if self.failure is not None:
            raise ScriptFailed("\n".join(filter(None, [str(self.failure), self.failure.traceback])))
        if self.diverged is not None:
            raise Diverged(self.diverged)
        if not self.ok:
            by = f"by signal {self.stopped_by}" if self.stopped_by is not None else "without a request"
            raise ScriptFailed(f"the run was stopped {by} after step {self.steps}")
        return self


@dataclass
class Tally:
    """The sums so far. `asked_at` is the monotonic time of the request."""

    virtual_workers: int
    workers: int
    asked_at: float
    taken_over: bool = False
    """Another leader has led this run before."""
    started: Started | None = None
    steps: list[StepReport] = field(default_factory=list)
    logs: list[LogRecord] = field(default_factory=list)
    probes: list[ProbeRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    finished: dict[int, WorkerFinished] = field(default_factory=dict)
    stop_requested: bool = False
    _restarting: tuple[JobFailure, float] | None = None
    _repeats: bool = False

    @property
    def step(self) -> int:
        """The last complete step."""
        done = self.steps[-1].step if self.steps else self.started.step if self.started else 0
        return max([done, *(finished.step for finished in self.finished.values())])

    def rate(self) -> float | None:
        """Samples per second of the last few seconds."""
        window = []
        for step in reversed(self.steps):
            if self.steps[-1].at - step.at > _RATE_WINDOW_S:
                break
            window.append(step)
        seconds = window[0].at - window[-1].at if window else 0.0
        return sum(step.samples for step in window[:-1]) / seconds if seconds > 0 else None

    def add(self, worker: int, message: FromWorker, now: float) -> None:
        """Add a worker's report."""
        match message:
            case Started():
                if self.started is None:
                    self.started = message
                    self.virtual_workers = message.virtual_workers or self.virtual_workers
                    if message.resumed_from:
                        self._note(EventKind.RESUME, now, f"resumed from {message.resumed_from}")
                self._restarted(message)
            case StepReports(steps=steps):
                self._add_steps(steps)
            case Logged(step=step, metrics=metrics):
                log = LogRecord(step=step, metrics=metrics)
                repeats = self._repeats or self._restarting is not None  # what it logs before its first loop
                if not repeats or log not in self.logs[-_REPEATED:]:
                    self.logs.append(log)
            case Probed(step=step, digest=digest, tensors=tensors):
                self.probes.append(ProbeRecord(step=step, digest=digest, tensors=tensors))
            case Checkpointed(step=step, path=path, seconds=seconds, blocked=blocked):
                self.checkpoints.append(
                    CheckpointRecord(step=step, path=path, seconds=seconds, blocked=blocked)
                )
                self._note(EventKind.CHECKPOINT, now, f"wrote {path}")
            case NotCheckpointed(reason=reason):
                self._note(EventKind.CHECKPOINT_FAILED, now, reason)
            case WorkerFinished():
                self.finished[worker] = message

    def _add_steps(self, steps: Sequence[StepReport]) -> None:
        repeats = self._repeats or self.taken_over
        known = {step.step for step in self.steps[-_REPEATED:]} if repeats else ()
        self.steps += [step for step in steps if step.step not in known]

    def may_repeat(self) -> None:
        """A worker was lost: the one that reports for the job from now on may repeat some reports."""
        self._repeats = True

    def recovered(self, result: SurvivorsGoOn, how: str, evidence: tuple[str, ...], now: float) -> None:
        """Workers have died, and the others went on."""
        self.workers = result.after
        self.events.append(
            Event(
                kind=EventKind.FAILURE,
                step=result.step,
                at=now - self.asked_at,
                reason=result.reason,
                from_workers=result.before,
                to_workers=result.after,
                pause_ms=result.paused * 1e3,
                recovered_from=how,
                micro_batches_redone=result.redone,
                evidence=evidence,
            )
        )

    def resized(self, done: ReconfigurationDone, now: float) -> None:
        """The number of workers has changed."""
        self.workers = done.after
        self.events.append(
            Event(
                kind=EventKind.RESIZE,
                step=done.step,
                at=now - self.asked_at,
                reason=done.change.reason,
                from_workers=done.before,
                to_workers=done.after,
                pause_ms=done.paused * 1e3,
                prepare_ms=done.prepared * 1e3,
                all_state_moved=done.why_all,
            )
        )

    def noticed(self, straggler: Straggler, now: float) -> None:
        """A worker has become slower than the others."""
        self._note(EventKind.STRAGGLER, now, str(straggler))

    def stood_still(self, found: Standstill, now: float) -> None:
        """No step has been completed for too long."""
        self._note(EventKind.STANDSTILL, now, str(found), evidence=found.stack_lines())

    def died(self, failure: JobFailure, now: float) -> None:
        """A worker has died, and the job restarts from its newest checkpoint, or from the start."""
        self._restarting = (failure, now)
        self.finished.clear()
        self.events.pop()  # the end, which it was not

    def suspended(self, now: float) -> None:
        """It has no workers any more; its newest checkpoint holds its state."""
        self.finished.clear()
        self.events.pop()  # the end, which it was not
        self._note(EventKind.RESIZE, now, "scaled to zero: suspended", to_workers=0)
        self.workers = 0

    def resumed(self, step: int, now: float, took: float) -> None:
        """It has workers again, and continues at `step`."""
        self.steps = [done for done in self.steps if done.step <= step]
        self.events.append(
            Event(
                kind=EventKind.RESIZE,
                step=step,
                at=now - self.asked_at,
                reason="given workers again",
                from_workers=0,
                to_workers=self.workers,
                pause_ms=took * 1e3,
                prepare_ms=took * 1e3,
            )
        )

    def _restarted(self, message: Started) -> None:
        """The job has restarted: steps after the checkpoint, or all, are run again."""
        if self._restarting is None:
            return
        (failure, since), self._restarting = self._restarting, None
        again = [step for step in self.steps if step.step > message.step]
        self.steps = [step for step in self.steps if step.step <= message.step]
        self.logs = [log for log in self.logs if log.step <= message.step]
        self.probes = [probe for probe in self.probes if probe.step <= message.step]
        self.events.append(
            Event(
                kind=EventKind.FAILURE,
                step=message.step + len(again),
                at=since - self.asked_at,
                reason=str(failure),
                evidence=tuple(failure.evidence.describe()),
                pause_ms=(message.at - since) * 1e3,
                recovered_from="start" if message.resumed_from is None else "checkpoint",
                micro_batches_redone=len(again) * self.virtual_workers,
            )
        )

    def refused(self, change: Reconfiguration, reason: str, now: float) -> None:
        """A requested change could not be made."""
        self._note(
            EventKind.RESIZE,
            now,
            f"not resized to {plural(change.workers, 'worker')}: {reason}",
            to_workers=self.workers,
        )

    def outcome(
        self,
        *,
        now: float,
        exit_codes: Mapping[int, int],
        failure: JobFailure | None,
        stopped: bool,
        stopped_by: int | None,
        cut: bool = False,
    ) -> Outcome:
        if failure is not None:
            evidence = failure.evidence.describe()
            self._note(EventKind.FAILURE, now, str(failure), to_workers=0, evidence=evidence)
        elif stopped or stopped_by is not None:
            self._note(EventKind.STOP, now, "asked to stop", to_workers=0)
        self.steps.sort(key=lambda step: step.step)  # a worker that leaves reports its last steps late
        began = self.started.at if self.started else self.asked_at
        first_step = reported_from = self.started.step if self.started else 0
        if self.taken_over:
            reported_from = self.steps[0].step - 1 if self.steps else self.step
            began = min([self.asked_at, *(step.at for step in self.steps[:1])])
        digests = {worker: self.finished[worker].digest for worker in sorted(self.finished)}
        return Outcome(
            virtual_workers=self.virtual_workers,
            workers=self.workers,
            first_step=first_step,
            reported_from=reported_from,
            steps=self.step,
            samples=sum(step.samples for step in self.steps),
            seconds=self.steps[-1].at - began if self.steps else 0.0,
            total_seconds=now - self.asked_at,
            losses=tuple(step.loss for step in self.steps),
            step_times=tuple(step.at - self.asked_at for step in self.steps),
            digest=next(iter(digests.values()), None),
            resumed_from=self.started.resumed_from if self.started else None,
            refused=tuple(self.started.refused) if self.started else (),
            reduction=self.started.reduction if self.started else None,
            checkpoints=tuple(self.checkpoints),
            logs=tuple(self.logs),
            probes=tuple(self.probes),
            events=tuple(self.events),
            exit_codes=tuple(code for _, code in sorted(exit_codes.items())),
            failure=failure,
            diverged=_difference(digests),
            stopped=stopped,
            stopped_by=stopped_by,
            stop_requested=self.stop_requested,
            cut=cut,
        )

    def _note(
        self,
        kind: EventKind,
        now: float,
        reason: str,
        to_workers: int | None = None,
        evidence: Sequence[str] = (),
    ) -> None:
        self.events.append(
            Event(
                kind=kind,
                step=self.step,
                at=now - self.asked_at,
                reason=reason,
                from_workers=self.workers if to_workers is not None else None,
                to_workers=to_workers,
                evidence=tuple(evidence),
            )
        )


def _difference(digests: Mapping[int, str]) -> str | None:
    """Workers hold replicas of the same state: their digests must be equal."""
    if len(set(digests.values())) <= 1:
        return None
    each = ", ".join(f"worker {worker} {digest[:16]}…" for worker, digest in digests.items())
    return (
        f"the workers ended with different state ({each}); something in the script depends on the worker it "
        "runs in, such as job.is_main or RANK deciding an update; `gyrostat verify` finds the first step and "
        "tensor that differ"
    )

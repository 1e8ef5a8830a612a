"""Runs a script in several configurations and compares the results.

1. All placements. The first run also gives the number of steps.
2. A run that is saved near the middle and resumed on another placement.
3. Plain DDP. It comes last, so that a script that fails only there still gets the other results.
4. For each pair to explain: both again, with the digest of every tensor, from the last step known to be equal to the first
   known to differ. This also shows whether they are repeatable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.core.job import DevicePool, Probe, ReductionOrder, TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.core.plural import plural
from gyrostat.job import environment
from gyrostat.job.launcher import RunRequest
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerSource
from gyrostat.job.verify.compare import DifferenceKind, RunPair, TracedRun, compare, locate, pairs_to_explain
from gyrostat.job.verify.diagnosis import DifferenceEvidence, diagnose
from gyrostat.job.verify.execution import Executor, NullVerifyObserver, RunFailed, VerifyObserver
from gyrostat.job.verify.plan import Against, Configuration, choose_cut, interrupted
from gyrostat.job.verify.sources import suspects_in
from gyrostat.job.verify.trace import Trace
from gyrostat.job.verify.verdict import VerifyFinding, VerifyVerdict, rows_of


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The script, and the configurations to compare."""

    program: Program
    placements: tuple[Placement, ...]
    """At least one, all of the same number of virtual workers."""
    against: Against = Against.DDP
    every: int = 10
    """Compare the state after every `every` steps, and at the end."""
    steps: int | None = None
    """The number of steps to compare; None: all."""
    threads: int = 1
    reduction: ReductionOrder | None = None
    """The order of addition; plain DDP then uses it too, as a communication hook."""
    pool: DevicePool | None = None
    """The device types of a heterogeneous job; None for an elastic one."""
    cwd: Path | None = None

    def check(self) -> None:
        """Raise `UsageError` for what cannot be verified, before any process is started."""
        if self.every < 1:
            raise UsageError(f"--every must be at least 1, got {self.every}")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps must be at least 1, got {self.steps}")
        RunRequest(
            program=self.program,
            placement=self.placements[0],
            options=TrainingOptions(threads=self.threads),
            cwd=self.cwd,
        ).check()

    @property
    def probe_every(self) -> int:
        """The interval of digests: the last step is included, even if the script continues after it."""
        return self.every if self.steps is None else math.gcd(self.every, self.steps)


def verify(
    request: VerifyRequest,
    *,
    parent: WorkerSource,
    observer: VerifyObserver | None = None,
    forward_signals: bool = False,
) -> VerifyVerdict:
    """Run all configurations. The verdict includes a failure of the script and differences. Bad input raises."""
    request.check()
    executor = Executor(
        program=request.program,
        directory=(request.cwd or Path()).absolute(),
        parent=parent,
        observer=observer or NullVerifyObserver(),
        forward_signals=forward_signals,
        reduction=request.reduction,
        pool=request.pool,
    )
    return _Verifier(request, executor).verdict()


class _Verifier:
    def __init__(self, request: VerifyRequest, executor: Executor) -> None:
        self._request, self._executor, self._observer = request, executor, executor.observer
        self._runs: list[TracedRun] = []
        self._findings: list[VerifyFinding] = []
        self._notes: list[str] = []

    def verdict(self) -> VerifyVerdict:
        failed = None
        try:
            self._run_all()
        except RunFailed as failure:
            failed = failure.failed
        if failed is None or (failed.configuration.reference and failed.outcome.failure is not None):
            try:
                self._explain_all()
            except RunFailed as failure:
                failed = failed or failure.failed
        return VerifyVerdict(
            virtual_workers=self._request.placements[0].virtual_workers,
            every=self._request.probe_every,
            rows=rows_of(self._runs, self._findings),
            findings=tuple(self._findings),
            notes=tuple(self._notes),
            failed=failed,
        )

    def _run_all(self) -> None:
        request = self._request
        plain = [Configuration(placement=placement) for placement in request.placements]
        reference = [Configuration(placement=request.placements[0], reference=True)]
        total = len(plain) + 1 + (request.against is Against.DDP)
        epochs = self._run_first(plain[0], total)
        self._run_others(plain[1:], total)
        cut = choose_cut(epochs)
        if any(run.trace.workers_differ for run in self._runs):
            self._notes.append("save and resume was not tested, because the workers of one run differ")
        elif cut is None:
            steps = plural(len(epochs), "step")
            self._notes.append(
                f"save and resume was not tested: the script makes only {steps}; give it more data or epochs"
            )
        else:
            self._run_others([interrupted(request.placements, cut)], total)
        if request.against is Against.DDP:
            self._run_others(reference, total)

    def _run_first(self, configuration: Configuration, total: int) -> Sequence[int]:
        """Returns the epoch of every step."""
        self._observer.run_started(configuration.name, 1, total, self._request.steps)
        run, epochs = self._run(configuration)
        _check_something_ran(run.trace, self._request.program)
        self._add(run)
        return epochs

    def _run_others(self, configurations: Sequence[Configuration], total: int) -> None:
        for configuration in configurations:
            number, steps = len(self._runs) + 1, self._runs[0].trace.steps
            self._observer.run_started(configuration.name, number, total, steps)
            self._add(self._run(configuration)[0])

    def _run(self, configuration: Configuration) -> tuple[TracedRun, Sequence[int]]:
        request = self._request
        probe = Probe(every=request.probe_every)
        return self._executor.run(configuration, probe, until=request.steps, threads=request.threads)

    def _add(self, run: TracedRun) -> None:
        self._runs.append(run)
        self._observer.run_ended(run, self._runs[0])

    def _explain_all(self) -> None:
        for pair in pairs_to_explain(self._runs):
            self._findings.append(self._explain(pair))
            if not self._findings[-1].evidence.repeatable:
                break  # then any two runs may differ for the same reason

    def _explain(self, pair: RunPair) -> VerifyFinding:
        difference = compare(pair.one.trace, pair.other.trace)
        assert difference is not None
        until = difference.step + (difference.kind is DifferenceKind.WORKERS)
        probe = Probe(every=1, first=difference.after + 1, last=until, tensors=True)
        one, other = (self._again(run, probe, until) for run in (pair.one, pair.other))
        located = locate(one, other)
        step = until if located is None else located.step
        repeatable = _equal(pair.one.trace, one) and _equal(pair.other.trace, other)
        threads = self._request.threads
        evidence = DifferenceEvidence(
            scope=pair.scope,
            kind=DifferenceKind.STATE
            if located is not None and difference.kind is DifferenceKind.LOSS
            else difference.kind,
            repeatable=repeatable,
            workers_differ=any(run.trace.workers_differ for run in (pair.one, pair.other)),
            tensors=() if located is None else located.tensors,
            threads=threads,
            repeatable_with_one_thread=self._repeatable_with_one_thread(pair.one, probe, until)
            if threads > 1 and not repeatable
            else None,
            hash_seed_fixed=environment.hash_seed_fixed(),
            suspects=suspects_in(self._request.program, self._executor.directory),
        )
        return VerifyFinding(
            pair=pair,
            difference=difference,
            located=located,
            loss_differs=_losses_differ(one, other, step),
            evidence=evidence,
            causes=diagnose(evidence),
        )

    def _again(self, run: TracedRun, probe: Probe, until: int, *, threads: int | None = None) -> Trace:
        name = f"{run.configuration.name}, again"
        self._observer.run_started(name if threads is None else f"{name}, with 1 thread", None, None, until)
        threads = threads or self._request.threads
        return self._executor.run(run.configuration, probe, until=until, threads=threads)[0].trace

    def _repeatable_with_one_thread(self, run: TracedRun, probe: Probe, until: int) -> bool:
        first, second = (self._again(run, probe, until, threads=1) for _ in range(2))
        return _equal(first, second)


def _equal(one: Trace, again: Trace) -> bool:
    return compare(one, again, whole=False) is None


def _losses_differ(one: Trace, other: Trace, step: int) -> bool:
    """Whether the losses up to a step differ; ignores the state."""
    losses = (
        Trace(steps=step, losses={s: loss for s, loss in trace.losses.items() if s <= step})
        for trace in (one, other)
    )
    return compare(*losses, whole=False) is not None


def _check_something_ran(trace: Trace, program: Program) -> None:
    if trace.digest is None and trace.steps == 0 and not trace.workers_differ:
        raise UsageError(
            f"{program.name} has nothing to verify: it ended without calling gyrostat.init; see docs/howto/from-ddp.md for "
            "what a script must do"
        )

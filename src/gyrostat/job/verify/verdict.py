"""The result of a verification, and its report as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyrostat.core.files import READABLE, write_atomically
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.verify.compare import Located, RunDifference, RunPair, TracedRun, compare
from gyrostat.job.verify.diagnosis import DifferenceEvidence, LikelyCause
from gyrostat.job.verify.plan import Configuration, counts


@dataclass(frozen=True, kw_only=True)
class VerifyFinding:
    """A difference between two runs, located and explained as far as possible."""

    pair: RunPair
    difference: RunDifference
    located: Located | None
    """None if no tensor differed when the two were run again."""
    loss_differs: bool
    """The loss of virtual worker 0 differed in or before that step, too."""
    evidence: DifferenceEvidence
    causes: tuple[LikelyCause, ...]

    @property
    def step(self) -> int:
        return self.difference.step if self.located is None else self.located.step

    @property
    def likely(self) -> tuple[LikelyCause, ...]:
        """The supported causes; if there are none, the first."""
        return tuple(cause for cause in self.causes if cause.supported) or self.causes[:1]

    @property
    def unlikely(self) -> tuple[LikelyCause, ...]:
        return tuple(cause for cause in self.causes if cause not in self.likely)


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """One line of the table: a run, compared with the first one."""

    run: TracedRun
    difference: RunDifference | None = None
    exact: bool = True
    """No earlier step differs."""


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """A run that cannot be compared: the script failed, or the user stopped it."""

    configuration: Configuration
    outcome: Outcome
    output: tuple[str, ...]
    """The last lines that its workers printed."""

    @property
    def exit_code(self) -> int:
        if self.outcome.stopped_by is not None:
            return 128 + self.outcome.stopped_by
        return self.outcome.exit_code or 1


@dataclass(frozen=True, kw_only=True)
class VerifyVerdict:
    virtual_workers: int
    every: int
    rows: tuple[VerifyRow, ...] = ()
    findings: tuple[VerifyFinding, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not tested, and why."""
    failed: FailedRun | None = None

    @property
    def equal(self) -> bool:
        return self.failed is None and all(row.difference is None for row in self.rows)

    @property
    def exit_code(self) -> int:
        if self.failed is not None:
            return self.failed.exit_code
        return 0 if self.equal else 1


def rows_of(runs: Sequence[TracedRun], findings: Sequence[VerifyFinding]) -> tuple[VerifyRow, ...]:
    """Every run compared with plain DDP, or with the first run if there is none. If a finding is about the same two results,
    the step is exact. The run compared with comes first.
    """
    ordered = sorted(runs, key=lambda run: not run.configuration.reference)
    return tuple(_row_of(run, ordered[0], findings) for run in ordered)


def _row_of(run: TracedRun, base: TracedRun, findings: Sequence[VerifyFinding]) -> VerifyRow:
    difference = compare(base.trace, run.trace)
    if difference is None:
        return VerifyRow(run=run)
    for finding in findings:
        if finding.evidence.repeatable and _about(finding, base, run):
            exact = RunDifference(kind=finding.evidence.kind, step=finding.step, after=finding.step - 1)
            return VerifyRow(run=run, difference=exact)
    return VerifyRow(run=run, difference=difference, exact=difference.step == difference.after + 1)


def _about(finding: VerifyFinding, one: TracedRun, other: TracedRun) -> bool:
    def same(a: TracedRun, b: TracedRun) -> bool:
        return a is b or compare(a.trace, b.trace) is None

    pair = finding.pair
    return (same(one, pair.one) and same(other, pair.other)) or (
        same(one, pair.other) and same(other, pair.one)
    )


def as_json(verdict: VerifyVerdict) -> dict[str, object]:
    """The report as an object for any JSON encoder."""
    return {
        "equal": verdict.equal,
        "virtual_workers": verdict.virtual_workers,
        "every": verdict.every,
        "notes": list(verdict.notes),
        "failed": None if verdict.failed is None else str(verdict.failed.outcome.failure or "stopped"),
        "findings": [_finding(finding) for finding in verdict.findings],
        "runs": [_row(row) for row in verdict.rows],
    }


def _row(row: VerifyRow) -> dict[str, object]:
    configuration, trace, difference = row.run.configuration, row.run.trace, row.difference
    resumed_on = configuration.resumed_on
    return {
        "configuration": configuration.name,
        "reference": configuration.reference,
        "placement": counts(configuration.placement),
        "cut": configuration.cut,
        "resumed_on": None if resumed_on is None else counts(resumed_on),
        "steps": trace.steps,
        "digest": trace.digest,
        "seconds": row.run.seconds,
        "same": difference is None,
        "differs": None if difference is None else {"in": str(difference.kind), "step": difference.step},
        "workers_differ": trace.workers_differ,
        "digests": {str(step): digest for step, digest in trace.digests.items()},
        "losses": list(trace.losses.values()),
    }


def _finding(finding: VerifyFinding) -> dict[str, object]:
    located = finding.located
    return {
        "between": [finding.pair.one.configuration.name, finding.pair.other.configuration.name],
        "scope": str(finding.pair.scope),
        "in": str(finding.evidence.kind),
        "step": finding.step,
        "tensor": None if located is None else located.tensors[0],
        "tensors_differing": [] if located is None else list(located.tensors),
        "tensors": None if located is None else located.total,
        "repeatable": finding.evidence.repeatable,
        "loss_differs": finding.loss_differs,
        "causes": [
            {
                "cause": str(cause.key),
                "says": cause.says,
                "do": cause.do,
                "lines": [str(line) for line in cause.lines],
            }
            for cause in finding.causes
        ],
    }


def write_report(path: Path, verdict: VerifyVerdict) -> None:
    """Atomic: a reader sees the old file or the complete new one."""
    data = msgspec.json.format(msgspec.json.encode(as_json(verdict)), indent=1) + b"\n"
    write_atomically(path, data, durable=False, mode=READABLE)

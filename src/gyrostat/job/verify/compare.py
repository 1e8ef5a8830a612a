"""Where two traces first differ, and which pairs of runs are worth explaining. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gyrostat.job.verify.plan import Configuration
from gyrostat.job.verify.trace import Trace


class DifferenceKind(StrEnum):
    """What differs."""

    STATE = "state"
    LOSS = "loss"
    """The loss of virtual worker 0; the state was not compared in that step, or was equal."""
    STEPS = "steps"
    """One run made more steps than the other, and was equal up to there."""
    WORKERS = "workers"
    """The workers of one run differed from each other, which ended the run."""


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    kind: DifferenceKind
    step: int
    """The first step at which a difference was seen."""
    after: int = 0
    """The last step before it whose state was compared and found equal."""


@dataclass(frozen=True, kw_only=True)
class Located:
    """The first step after which tensors differ, and those tensors in their order in the state."""

    step: int
    tensors: tuple[str, ...]
    total: int


class Scope(StrEnum):
    """Between which runs a difference appears."""

    PLACEMENT = "placement"
    RESUME = "resume"
    DDP = "ddp"


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """A configuration and the trace of its run."""

    configuration: Configuration
    trace: Trace
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunPair:
    """Two runs that should be equal and are not."""

    scope: Scope
    one: TracedRun
    other: TracedRun


def compare(one: Trace, other: Trace, *, whole: bool = True) -> RunDifference | None:
    """The first difference. `whole`: both ran to their end; otherwise one may have been stopped earlier."""
    after = 0
    digests = one.digests.keys() & other.digests.keys()
    losses = one.losses.keys() & other.losses.keys()
    for step in sorted(digests | losses):
        if step in digests and one.digests[step] != other.digests[step]:
            return RunDifference(kind=DifferenceKind.STATE, step=step, after=after)
        if step in losses and _bits(one.losses[step]) != _bits(other.losses[step]):
            return RunDifference(kind=DifferenceKind.LOSS, step=step, after=after)
        if step in digests:
            after = step
    last = min(one.steps, other.steps)
    if whole:
        workers_differ = bool(one.workers_differ or other.workers_differ)
    else:
        workers_differ = one.steps == other.steps and bool(one.workers_differ) != bool(other.workers_differ)
    if workers_differ:
        return RunDifference(kind=DifferenceKind.WORKERS, step=last, after=after)
    if whole and one.steps != other.steps:
        return RunDifference(kind=DifferenceKind.STEPS, step=last + 1, after=after)
    return None


def locate(one: Trace, other: Trace) -> Located | None:
    """The first step and tensors that differ, among the steps with digests of tensors."""
    for step in sorted(one.tensors.keys() & other.tensors.keys()):
        here, there = one.tensors[step], other.tensors[step]
        names = dict.fromkeys([*here, *there])
        if differing := tuple(name for name in names if here.get(name) != there.get(name)):
            return Located(step=step, tensors=differing, total=len(names))
    return None


def pairs_to_explain(runs: Sequence[TracedRun]) -> list[RunPair]:
    """At most one pair per scope; none for a difference that an earlier pair explains."""
    reference = next((run for run in runs if run.configuration.reference), None)
    plain = [run for run in runs if not run.configuration.reference and run.configuration.cut is None]
    plain.sort(
        key=lambda run: run.trace.workers_differ is not None
    )  # runs without a divergence of workers first
    resumed = next((run for run in runs if run.configuration.cut is not None), None)
    anchor = next((run for run in plain if reference and _same(run, reference)), plain[0])
    odd = next((run for run in plain if not _same(anchor, run)), None)
    pairs = []
    if odd is not None:
        pairs.append(RunPair(scope=Scope.PLACEMENT, one=anchor, other=odd))
    elif resumed is not None and not _same(anchor, resumed):
        begun_on = next(
            run for run in plain if run.configuration.placement == resumed.configuration.placement
        )
        pairs.append(RunPair(scope=Scope.RESUME, one=begun_on, other=resumed))
    if reference is not None and not _same(anchor, reference):
        fixed = [run for run in plain if _one_each(run.configuration)]
        if odd is None or (
            fixed and fixed[0] is not odd
        ):  # otherwise the difference between placements explains it
            pairs.append(RunPair(scope=Scope.DDP, one=reference, other=(fixed or plain)[0]))
    if not pairs and anchor.trace.workers_differ:  # there is no other run
        pairs.append(RunPair(scope=Scope.PLACEMENT, one=anchor, other=anchor))
    return pairs


def _same(one: TracedRun, other: TracedRun) -> bool:
    return one is other or compare(one.trace, other.trace) is None


def _one_each(configuration: Configuration) -> bool:
    return configuration.placement.workers == configuration.placement.virtual_workers


def _bits(loss: float | None) -> bytes:
    """NaN does not equal itself; its bits do."""
    return b"" if loss is None else struct.pack("d", loss)

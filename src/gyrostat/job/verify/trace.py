"""What a run leaves behind that another run can be compared with: its losses, and digests of its state.

A trace is made of an `Outcome`; that of a run in two halves is the two joined. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gyrostat.core.errors import Diverged
from gyrostat.job.control.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Steps are counted from 1; what is said of step s is the state after s steps."""

    steps: int
    losses: Mapping[int, float | None] = field(default_factory=dict)
    """Virtual worker 0's, of every step."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Of all tracked state, after some steps and at the end."""
    tensors: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Of each tensor by its name, in the objects' own order, after the steps for which that was asked."""
    workers_differ: str | None = None
    """Says how, if workers that must hold equal state did not; the run ended there."""

    @property
    def digest(self) -> str | None:
        """The last one."""
        return self.digests[max(self.digests)] if self.digests else None


def trace_of(outcome: Outcome) -> Trace:
    """The trace of a run, or of a part of one."""
    digests = {probe.step: probe.digest for probe in outcome.probes}
    if outcome.digest is not None:
        digests[outcome.steps] = outcome.digest
    return Trace(
        steps=outcome.steps,
        losses=dict(enumerate(outcome.losses, start=outcome.first_step + 1)),
        digests=digests,
        tensors={probe.step: probe.tensors for probe in outcome.probes if probe.tensors},
        workers_differ=divergence(outcome),
    )


def join(first: Trace, second: Trace) -> Trace:
    """The trace of a run that was saved after `first` and resumed as `second`."""
    return Trace(
        steps=second.steps,
        losses={**first.losses, **second.losses},
        digests={**first.digests, **second.digests},
        tensors={**first.tensors, **second.tensors},
        workers_differ=first.workers_differ or second.workers_differ,
    )


def divergence(outcome: Outcome) -> str | None:
    """What the engine says if the run ended because its workers did not hold equal state. To `verify` that is
    a difference like any other, not a failure of the script.
    """
    raised = f"raised {Diverged.__name__}: "
    if outcome.failure is not None and outcome.failure.summary.startswith(raised):
        return outcome.failure.summary.removeprefix(raised)
    return outcome.diverged

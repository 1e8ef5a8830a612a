"""The trace of a run, to compare it with other runs: its losses, and digests of its state.

A trace is made from an `Outcome`; that of a run in two parts is joined from both. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gyrostat.core.errors import Diverged
from gyrostat.job.control.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Steps count from 1; digests of step s are of the state after s steps."""

    steps: int
    losses: Mapping[int, float | None] = field(default_factory=dict)
    """The loss of virtual worker 0 in every step."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Digests of all tracked state, after some steps and at the end."""
    tensors: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Digests of each tensor by name, in the order of the state, after the steps for which they were requested."""
    workers_differ: str | None = None
    """How workers of the run differed that must hold equal state; the run ended there."""

    @property
    def digest(self) -> str | None:
        """The last digest of the state."""
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
    """The engine's message if the run ended because its workers did not hold equal state. `verify` treats that as a difference,
    not as a failure of the script.
    """
    raised = f"raised {Diverged.__name__}: "
    if outcome.failure is not None and outcome.failure.summary.startswith(raised):
        return outcome.failure.summary.removeprefix(raised)
    return outcome.diverged

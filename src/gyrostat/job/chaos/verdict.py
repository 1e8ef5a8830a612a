"""Compares a run under faults with the undisturbed one, and reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyrostat.job.chaos.record import RecordedRun


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault that was injected, and its effect."""

    round: int
    at: float
    """Seconds since training began, in this round."""
    kind: str
    target: str
    step: int
    """The number of completed steps."""
    until_next_step: float | None = None
    """Seconds; None: no step was completed after it."""


def differences(recorded: RecordedRun, undisturbed: RecordedRun) -> list[str]:
    """A description of each difference; empty if the run equals the undisturbed one bit for bit."""
    found = list(recorded.contradictions)
    if not recorded.digests:
        found.append("the run did not finish")
    elif recorded.digests != undisturbed.digests:
        found.append(
            f"the digest is {', '.join(sorted(recorded.digests))}, that of the undisturbed run "
            f"{', '.join(sorted(undisturbed.digests))}"
        )
    missing = sorted(undisturbed.steps.keys() - recorded.steps.keys())
    extra = sorted(recorded.steps.keys() - undisturbed.steps.keys())
    if missing:
        found.append(f"{len(missing)} steps are missing; the first is step {missing[0]}")
    if extra:
        found.append(f"{len(extra)} steps are not in the undisturbed run; the first is step {extra[0]}")
    common = sorted(recorded.steps.keys() & undisturbed.steps.keys())
    wrong = [step for step in common if recorded.steps[step] != undisturbed.steps[step]]
    if wrong:
        first = wrong[0]
        found.append(
            f"{len(wrong)} steps differ; the first is step {first}: loss and samples {recorded.steps[first]}, undisturbed "
            f"{undisturbed.steps[first]}"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run under faults."""

    recorded: RecordedRun
    faults: Sequence[InjectedFault]
    differences: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ChaosVerdict:
    seed: int
    undisturbed: RecordedRun
    rounds: Sequence[Round]

    @property
    def ok(self) -> bool:
        return bool(self.rounds) and not any(round.differences for round in self.rounds)

    @property
    def faults(self) -> list[InjectedFault]:
        return [fault for round in self.rounds for fault in round.faults]

    def as_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "seed": self.seed,
            "digest": next(iter(self.undisturbed.digests), None),
            "steps": len(self.undisturbed.steps),
            "samples": self.undisturbed.samples,
            "rounds": [
                {
                    "samples": round.recorded.samples,
                    "recovered_from_peers": len(round.recorded.recovered),
                    "micro_batches_redone": round.recorded.redone,
                    "restored_from_checkpoint": round.recorded.restored,
                    "differences": list(round.differences),
                }
                for round in self.rounds
            ],
            "faults": [
                {
                    "round": fault.round,
                    "at": fault.at,
                    "kind": str(fault.kind),
                    "whom": fault.target,
                    "step": fault.step,
                    "until_next_step": fault.until_next_step,
                }
                for fault in self.faults
            ],
        }

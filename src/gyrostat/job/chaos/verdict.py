"""Did the faults leave a trace in the result? Pure: two recorded runs in, what differs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyrostat.job.chaos.record import RecordedRun


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A fault, and what came of it."""

    round: int
    at: float
    """Seconds since training began, in this round."""
    kind: str
    whom: str
    step: int
    """So many steps were complete."""
    until_next_step: float | None = None
    """Seconds; None: there was no other step."""


def differences(recorded: RecordedRun, undisturbed: RecordedRun) -> list[str]:
    """In words; none if the run is, bit for bit, the one that was left alone."""
    found = list(recorded.contradictions)
    if not recorded.digests:
        found.append("it did not come to its end")
    elif recorded.digests != undisturbed.digests:
        found.append(
            f"its digest is {', '.join(sorted(recorded.digests))}, that of the undisturbed run "
            f"{', '.join(sorted(undisturbed.digests))}"
        )
    missing = sorted(undisturbed.steps.keys() - recorded.steps.keys())
    extra = sorted(recorded.steps.keys() - undisturbed.steps.keys())
    if missing:
        found.append(f"{len(missing)} steps were never reported, the first is step {missing[0]}")
    if extra:
        found.append(f"{len(extra)} steps too many were made, the first is step {extra[0]}")
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
    struck: Sequence[Struck]
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
    def struck(self) -> list[Struck]:
        return [struck for round in self.rounds for struck in round.struck]

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
                    "recovered_from_peers": len(round.recorded.rescued),
                    "micro_batches_redone": round.recorded.redone,
                    "restored_from_checkpoint": round.recorded.restored,
                    "differences": list(round.differences),
                }
                for round in self.rounds
            ],
            "faults": [
                {
                    "round": struck.round,
                    "at": struck.at,
                    "kind": str(struck.kind),
                    "whom": struck.whom,
                    "step": struck.step,
                    "until_next_step": struck.until_next_step,
                }
                for struck in self.struck
            ],
        }

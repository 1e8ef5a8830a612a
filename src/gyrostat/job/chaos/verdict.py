"""Compares a run under faults with the undisturbed one, and reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gyrostat.job.chaos.record import RecordedRun


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault that was injected, and its effect."""

    round: int
    at: float
    """Seconds since the processes of the round were started."""
    kind: str
    target: str
    step: int
    """The last step that was completed before."""
    until_next_step: float | None = None
    """Seconds; None: no step was completed after it."""

    def __str__(self) -> str:
        return f"{self.at:.1f} s, step {self.step}: {self.kind}: {self.target}"


class RoundFailureKind(StrEnum):
    """In which way a run has failed."""

    WRONG_RESULT = "wrong result"
    HANG = "hang"
    EXIT_CODE = "untrue exit code"
    GAVE_UP = "gave up"
    """It ended with an error, and says so."""


@dataclass(frozen=True)
class RoundFailure:
    kind: RoundFailureKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def differences(recorded: RecordedRun, undisturbed: RecordedRun) -> list[str]:
    """A description of each difference to the undisturbed run; empty if what was recorded equals it bit for bit."""
    if recorded.on_servers:
        return _differences_on_servers(recorded, undisturbed)
    found = list(recorded.contradictions)
    extra = sorted(recorded.steps.keys() - undisturbed.steps.keys())
    if recorded.digests and recorded.digests != undisturbed.digests:
        found.append(
            f"the digest is {', '.join(sorted(recorded.digests))}, that of the undisturbed run "
            f"{', '.join(sorted(undisturbed.digests))}"
        )
    missing = sorted(undisturbed.steps.keys() - recorded.steps.keys()) if recorded.digests else []
    if missing:
        found.append(f"missing steps: {len(missing)}; the first is step {missing[0]}")
    if extra:
        found.append(
            f"steps that the undisturbed run did not make: {len(extra)}; the first is step {extra[0]}"
        )
    common = sorted(recorded.steps.keys() & undisturbed.steps.keys())
    wrong = [step for step in common if recorded.steps[step] != undisturbed.steps[step]]
    if wrong:
        first = wrong[0]
        found.append(
            f"steps that differ: {len(wrong)}; the first is step {first}: loss and samples {recorded.steps[first]}, "
            f"undisturbed {undisturbed.steps[first]}"
        )
    return found


def _differences_on_servers(recorded: RecordedRun, undisturbed: RecordedRun) -> list[str]:
    """Every batch must be counted once. Digests are compared if they do not depend on the order of updates."""
    mine, theirs = recorded.totals, undisturbed.totals
    if mine is None or theirs is None:
        return []
    found = []
    if mine.updates != theirs.updates:
        found.append(f"{mine.updates} updates, the undisturbed run {theirs.updates}")
    if mine.samples is not None and mine.samples != theirs.samples:
        found.append(f"{mine.samples} samples, the undisturbed run {theirs.samples}")
    if undisturbed.digests and mine.digest not in undisturbed.digests:
        found.append(f"the digest is {mine.digest}, that of the undisturbed run {theirs.digest}")
    return found


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run under faults."""

    jobs: Sequence[RecordedRun]
    """The job, and those that compete with it."""
    began: float
    faults: Sequence[InjectedFault]
    failures: Sequence[RoundFailure]

    def compared(self, undisturbed: RecordedRun) -> list[RoundFailure]:
        """All failures, wrong results included."""
        found = [text for job in self.jobs for text in differences(job, undisturbed)]
        return [*(RoundFailure(RoundFailureKind.WRONG_RESULT, text) for text in found), *self.failures]

    @property
    def samples(self) -> int:
        return sum(job.samples for job in self.jobs)

    @property
    def recovered(self) -> int:
        """How often peers recovered the job."""
        return sum(len(job.recovered) for job in self.jobs)

    @property
    def restored(self) -> int:
        """How often it was restored from a checkpoint."""
        return sum(job.restored for job in self.jobs)

    @property
    def begun_again(self) -> int:
        """How often it began at step 0 again."""
        return sum(max(0, job.begun - 1) for job in self.jobs)


@dataclass(frozen=True, kw_only=True)
class ChaosVerdict:
    seed: int
    """That of the first round; the next round has the next one."""
    undisturbed: RecordedRun
    rounds: Sequence[Round]

    @property
    def ok(self) -> bool:
        return bool(self.rounds) and not any(round.failures for round in self.rounds)

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
                    "seed": self.seed + number,
                    "samples": [job.samples for job in round.jobs],
                    "recovered_from_peers": round.recovered,
                    "micro_batches_redone": sum(job.redone for job in round.jobs),
                    "restored_from_checkpoint": round.restored,
                    "begun_again": round.begun_again,
                    "failures": [{"kind": failure.kind, "text": failure.text} for failure in round.failures],
                }
                for number, round in enumerate(self.rounds)
            ],
            "faults": [
                {
                    "round": fault.round,
                    "at": fault.at,
                    "kind": str(fault.kind),
                    "target": fault.target,
                    "step": fault.step,
                    "until_next_step": fault.until_next_step,
                }
                for fault in self.faults
            ],
        }

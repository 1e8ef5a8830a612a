"""What happens to a job besides its steps: the one schema that reports, dashboard and replays read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    RESIZE = "resize"
    FAILURE = "failure"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_FAILED = "checkpoint_failed"
    STOP = "stop"
    STRAGGLER = "straggler"
    STANDSTILL = "standstill"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened at a boundary, or, for a failure, in the step after it."""

    kind: EventKind
    step: int
    """So many steps were complete."""
    at: float
    """Seconds since the run was asked for."""
    reason: str
    from_workers: int | None = None
    to_workers: int | None = None
    pause_ms: float | None = None
    """How long training stood still."""
    prepare_ms: float | None = None
    all_state_moved: str | None = None
    """Why newcomers were told all state at the fence instead of following the others up to it."""
    recovered_from: str | None = None
    """"peers" or "checkpoint"; "approximate": by peers, without what the lost worker had computed in that pass."""
    micro_batches_redone: int | None = None
    evidence: tuple[str, ...] = ()
    """In lines: what a worker that died left behind, or the stacks of workers that stand still."""

    def as_json(self) -> dict[str, object]:
        """For a report; what does not apply is left out."""
        fields: dict[str, object] = {
            "kind": str(self.kind),
            "step": self.step,
            "at": self.at,
            "from": self.from_workers,
            "to": self.to_workers,
            "pause_ms": self.pause_ms,
            "prepare_ms": self.prepare_ms,
            "all_state_moved": self.all_state_moved,
            "recovered_from": self.recovered_from,
            "micro_batches_redone": self.micro_batches_redone,
            "reason": self.reason,
            "evidence": list(self.evidence) or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

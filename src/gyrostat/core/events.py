"""Events of a job besides its steps: the schema that reports, the dashboard and replays read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyrostat.core.roles import ProcessRole


class EventKind(StrEnum):
    """File format: the values are in reports and in the REST API."""

    RESIZE = "resize"
    FAILURE = "failure"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_FAILED = "checkpoint_failed"
    STOP = "stop"
    STRAGGLER = "straggler"
    STANDSTILL = "standstill"
    MOVE = "move"
    """Slots of parameters have moved between servers."""
    ROLL_BACK = "roll_back"
    """Parameters and shard queues have gone back to a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event at a boundary or, for a failure, in the step after it."""

    kind: EventKind
    step: int
    """Number of completed steps."""
    at: float
    """Seconds since the run was requested."""
    reason: str
    from_workers: int | None = None
    to_workers: int | None = None
    pause_ms: float | None = None
    """How long training was paused."""
    prepare_ms: float | None = None
    all_state_moved: str | None = None
    """Why newcomers received all state at the fence instead of catching up before it."""
    recovered_from: str | None = None
    """"peers", "checkpoint", "start": the job began again without one, or "approximate": by peers, without the lost worker's
    gradients of that pass."""
    micro_batches_redone: int | None = None
    role: ProcessRole | None = None
    """Of a job with parameter servers: which of its processes this is about. `from_workers` and `to_workers` count them."""
    evidence: tuple[str, ...] = ()
    """Lines of text: evidence of a worker that died, or the stacks of workers that hang."""

    def as_json(self) -> dict[str, object]:
        """For a report; fields that do not apply are left out."""
        fields: dict[str, object] = {
            "kind": str(self.kind),
            "role": None if self.role is None else str(self.role),
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

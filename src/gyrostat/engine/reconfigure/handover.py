"""What a newcomer receives at the fence besides what it has replayed (`catch_up.py`): the job at that boundary, as a tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import JobSnapshot

_PROGRESS = tuple(Progress.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Handover:
    """All that a newcomer needs to resume at a boundary."""

    snapshot: JobSnapshot
    turns: Mapping[str, Any]
    """When checkpoints are due."""
    batches: int | None
    """Micro-batches of each virtual worker in the loop that is running, if that is known."""
    completed_collectives: int
    """By the old members, since the job began."""
    since: int
    """When the donor reached this boundary, in nanoseconds of its clock."""

    def to_tree(self) -> dict[str, Any]:
        snapshot = self.snapshot
        return {
            "job": dict(snapshot.job),
            "fingerprint": dict(snapshot.fingerprint),
            "progress": [getattr(snapshot.progress, name) for name in _PROGRESS],
            "shared": snapshot.shared,
            "contexts": list(snapshot.contexts),
            "turns": dict(self.turns),
            "batches": self.batches,
            "completed_collectives": self.completed_collectives,
            "since": self.since,
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> Handover:
        snapshot = JobSnapshot(
            job=tree["job"],
            fingerprint=tree["fingerprint"],
            progress=Progress(*tree["progress"]),
            shared=tree["shared"],
            contexts=tree["contexts"],
        )
        return Handover(
            snapshot=snapshot,
            turns=tree["turns"],
            batches=tree["batches"],
            completed_collectives=tree["completed_collectives"],
            since=tree["since"],
        )

"""The content of a checkpoint, as a tree and flattened, and the result of a search for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyrostat.core.errors import CheckpointError, UsageError
from gyrostat.core.progress import Progress
from gyrostat.engine.state.statetree import Flat, Skeleton, flatten


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """A job at a boundary. Values are trees as `engine/state/statetree` describes them."""

    job: Mapping[str, Any]
    """The job's identity: number of virtual workers, seed, names of tracked objects, and so on."""
    fingerprint: Mapping[str, str]
    """What else decides bits (`numerics/fingerprint.py`)."""
    progress: Progress
    shared: Any
    """The one copy of shared state."""
    contexts: Sequence[Any]
    """The contexts of all virtual workers, by rank. Empty if it was imported."""


@dataclass(frozen=True, kw_only=True)
class FlatSnapshot:
    """A flattened snapshot, as it is written. Its skeletons are copies; its tensors may be those of the job."""

    job: Skeleton
    fingerprint: Mapping[str, str]
    progress: Progress
    shared: Flat
    contexts: Flat


def flatten_snapshot(snapshot: JobSnapshot) -> FlatSnapshot:
    """Flatten a snapshot, without copying tensors. Raises UsageError if a value cannot be stored."""
    job = flatten(dict(snapshot.job))
    if job.tensors:
        raise UsageError(f"{job.tensors[0][0]!r} in the job's identity is a tensor; use a plain value")
    return FlatSnapshot(
        job=job.skeleton,
        fingerprint=dict(snapshot.fingerprint),
        progress=snapshot.progress,
        shared=flatten(snapshot.shared),
        contexts=flatten(list(snapshot.contexts)),
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search: the newest usable checkpoint, if any, and why newer ones cannot be used."""

    path: Path | None = None
    snapshot: JobSnapshot | None = None
    errors: Sequence[CheckpointError] = field(default_factory=list)

    @property
    def refused(self) -> list[str]:
        """Why each newer checkpoint was refused, newest first."""
        return [str(error) for error in self.errors]

    def usable(self) -> JobSnapshot | None:
        """The snapshot, or None if no checkpoint exists. Raises if checkpoints exist and none can be used."""
        if self.snapshot is None and self.errors:
            reasons = "\n".join(f"  {reason}" for reason in self.refused)
            raise type(self.errors[0])(
                f"there are checkpoints, but none can be used:\n{reasons}\n"
                "use another --checkpoint-dir, or --no-resume to set these aside and begin from scratch"
            )
        return self.snapshot

"""What a checkpoint holds, whole and taken apart, and what a search for one returns."""

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
    """A job at a boundary. Values are trees as `engine.statetree` describes them."""

    job: Mapping[str, Any]
    """What makes it this job: number of virtual workers, seed, names of what is tracked, and so on."""
    fingerprint: Mapping[str, str]
    """What else decides bits."""
    progress: Progress
    shared: Any
    """The one copy of shared state."""
    contexts: Sequence[Any]
    """The contexts of all virtual workers, in the order of their ranks. None if it was imported."""

    @property
    def imported(self) -> bool:
        """Made from another program's file: it knows only a part of the above."""
        return not self.contexts


@dataclass(frozen=True, kw_only=True)
class FlatSnapshot:
    """A snapshot taken apart, as it is written. Skeletons are of their own; tensors may be those of the job."""

    job: Skeleton
    fingerprint: Mapping[str, str]
    progress: Progress
    shared: Flat
    contexts: Flat


def take_apart(snapshot: JobSnapshot) -> FlatSnapshot:
    """Nothing is copied yet. Raises UsageError if something in it cannot be stored."""
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
    """The outcome of a search: the newest usable checkpoint, if any, and why newer ones were passed over."""

    path: Path | None = None
    snapshot: JobSnapshot | None = None
    errors: Sequence[CheckpointError] = field(default_factory=list)

    @property
    def refused(self) -> list[str]:
        """Why each newer checkpoint was refused, newest first."""
        return [str(error) for error in self.errors]

    def usable(self) -> JobSnapshot | None:
        """The snapshot; None if there is no checkpoint; an error if there are some but none can be used."""
        if self.snapshot is None and self.errors:
            reasons = "\n".join(f"  {reason}" for reason in self.refused)
            raise type(self.errors[0])(
                f"there are checkpoints, but none can be used:\n{reasons}\n"
                "use another --checkpoint-dir, or --no-resume to set these aside and begin from scratch"
            )
        return self.snapshot

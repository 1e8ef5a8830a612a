"""A small job's snapshots, all different, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import JobSnapshot


@pytest.fixture
def snapshot_at() -> Callable[[int], JobSnapshot]:
    """The snapshot of a job of two virtual workers after `steps` steps."""

    def snapshot(step: int) -> JobSnapshot:
        weight = torch.full((2, 3), float(step))
        return JobSnapshot(
            job={"virtual_workers": 2, "seed": 0},
            fingerprint={"torch": "2.13.0", "threads": "1"},
            progress=Progress(step=step, epoch=0, done=step),
            shared={"tracked": {"model": {"weight": weight, "tied": weight, "count": step}}},
            contexts=[{"rng": torch.full((20,), step + rank, dtype=torch.uint8)} for rank in range(2)],
        )

    return snapshot

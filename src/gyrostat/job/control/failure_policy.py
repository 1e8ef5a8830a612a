"""`FailurePolicy`: what happens to a job whose workers die, hang, become slow or must leave.

How survivors recover from a lost worker is one of its `TrainingOptions`, because they need to prepare for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gyrostat.core.errors import UsageError
from gyrostat.job.diagnostics.poison import LIMIT
from gyrostat.job.diagnostics.stragglers import StragglerPolicy
from gyrostat.job.diagnostics.watchdog import WatchdogPolicy


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    min_workers: int = 1
    """With fewer workers the job waits for others."""
    heartbeat_timeout_s: float = 60.0
    """Seconds after which a worker that does not answer counts as lost; 0: never."""
    grace_s: float = 30.0
    """Seconds within which a worker that was sent SIGTERM must leave at a boundary."""
    restarts: int = 0
    """The maximum number of restarts, from a checkpoint or from the start, after failures that are not the script's."""
    poison_limit: int = LIMIT
    """The job ends when this number of workers have died while they ran the same micro-batch; 0: never."""
    stragglers: StragglerPolicy = field(default_factory=StragglerPolicy)
    """When a worker counts as slow, and the response."""
    watchdog: WatchdogPolicy | None = None
    """When training counts as standing still, and the response."""

    def __post_init__(self) -> None:
        if not 0 <= self.heartbeat_timeout_s < math.inf:
            raise UsageError(
                f"--heartbeat-timeout must be 0 (never) or more seconds, got {self.heartbeat_timeout_s:g}"
            )
        if not 0 <= self.grace_s < math.inf:
            raise UsageError(f"--grace must be 0 or more seconds, got {self.grace_s:g}")

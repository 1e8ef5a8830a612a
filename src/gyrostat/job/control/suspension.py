"""A job that is suspended: it has no workers, and its newest checkpoint holds its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gyrostat.job.control.executor import ZeroScaleRequest


@dataclass
class Suspension:
    request: ZeroScaleRequest | None = None
    """The request that suspends or resumes the job."""
    since: float = 0.0
    step: int = 0
    """The last complete step when the job was suspended."""
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Of the last attempt."""

    def begin(self, request: ZeroScaleRequest, now: float) -> None:
        self.request, self.since = request, now

    def take(self) -> tuple[ZeroScaleRequest, float]:
        """The request, which is answered now, and when it came."""
        request, self.request = self.request, None
        assert request is not None
        return request, self.since

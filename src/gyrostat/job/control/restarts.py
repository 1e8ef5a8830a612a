"""How often, and after which delay, a job is restarted after a failure: decided purely.

As under torchrun the number of restarts is limited, over the whole job. The first one after some progress is immediate. If the
job fails again before it has completed a new step, the next one is delayed, twice as long every time, up to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyrostat.core.backoff import Backoff

DELAY = Backoff(first_s=1.0, longest_s=60.0)


@dataclass
class Restarts:
    """The restarts of one job."""

    limit: int
    made: int = 0
    in_vain: int = 0
    """Restarts since the last progress."""
    furthest: int = -1
    """The last step that was complete at a failure."""

    def died(self, step: int) -> float | None:
        """The job has failed after `step` steps. Returns the delay of the restart in seconds; None: no restart is left."""
        if self.made >= self.limit:
            return None
        self.in_vain = 0 if step > self.furthest else self.in_vain + 1
        self.furthest = max(self.furthest, step)
        self.made += 1
        return DELAY.after(self.in_vain)

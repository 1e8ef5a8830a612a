"""How often, and how soon, a job is started again after a death: decided purely.

As under torchrun the number of restarts is limited, over the whole job. The first one after some progress comes at once. If
the job then dies again before it has completed a step that it had not before, the next waits, twice as long every time, up to
a cap: what kills it may pass, and meanwhile nobody is kept busy in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


@dataclass
class Restarts:
    """The restarts of one job."""

    limit: int
    made: int = 0
    in_vain: int = 0
    """Since the last progress."""
    furthest: int = -1
    """The last step that was complete at a death."""

    def died(self, step: int) -> float | None:
        """The job has died after `step` steps. In how many seconds it is to be started again; None: no more."""
        if self.made >= self.limit:
            return None
        self.in_vain = 0 if step > self.furthest else self.in_vain + 1
        self.furthest = max(self.furthest, step)
        self.made += 1
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self.in_vain - 1)) if self.in_vain else 0.0

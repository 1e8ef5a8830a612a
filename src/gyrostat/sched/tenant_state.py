"""What the scheduler keeps of one virtual cluster besides its view. `sched.state` writes it."""

from __future__ import annotations

import math

from gyrostat.sched.policy import Policy
from gyrostat.sched.views import VcView


class TenantState:
    """One VC: its policy, the view that the policy sees, and when the policy decides again."""

    def __init__(self, policy: Policy, view: VcView) -> None:
        self.policy = policy
        self.view = view
        self.dirty = True
        """Something has changed since its policy last decided."""
        self.wants_to_borrow = True
        """Its waiting jobs have changed since it last asked to borrow."""
        self.wake_at = math.inf

    @property
    def borrowed_share(self) -> float:
        return sum(self.view.borrowed.values()) / self.view.weight

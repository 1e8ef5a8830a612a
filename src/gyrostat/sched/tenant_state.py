"""A virtual cluster: its configuration, and what the scheduler keeps of it besides its view. `sched.state` writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gyrostat.core.roles import ServerCapacity
from gyrostat.sched.policy import Policy
from gyrostat.sched.server_quota import ServerQuota
from gyrostat.sched.views import VcView


@dataclass(frozen=True, kw_only=True)
class Vc:
    """The configuration of a virtual cluster: its policy, and its weight when idle devices of other VCs are lent."""

    name: str
    policy: Policy
    weight: float = 1.0
    servers: ServerCapacity | None = None
    """For parameter servers; None: not limited."""


class TenantState:
    """One VC: its policy, the view that the policy sees, and when the policy decides again."""

    def __init__(self, vc: Vc, view: VcView) -> None:
        self.policy = vc.policy
        self.view = view
        self.servers = ServerQuota(vc.servers)
        self.dirty = True
        """Something has changed since its policy last decided."""
        self.wants_to_borrow = True
        """Its waiting jobs have changed since it last asked to borrow."""
        self.wake_at = math.inf

    @property
    def borrowed_share(self) -> float:
        return sum(self.view.borrowed.values()) / self.view.weight

"""The options of one node of a job on several."""

from __future__ import annotations

from dataclasses import dataclass, field

from gyrostat.job.nodes.lease import Timing


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """One node of a job on several."""

    node: str
    """Its name; no two agents of a job have the same."""
    nodes: int
    """The number of agents for which the job waits before it starts."""
    host: str
    """The address at which the other nodes reach this one."""
    port: int = 0
    token: str | None = None
    node_timeout: float = 60.0
    """Seconds for which an agent may be away before its workers count as lost, and their fork server kills them. If no worker
    has an agent, and one has had none for half the time, the job stops with a checkpoint."""
    timing: Timing = field(default_factory=Timing)

    @property
    def answer_within(self) -> float:
        """Seconds for which a request waits for a leader: longer than it takes to replace one."""
        return 2 * self.timing.ttl + 5.0

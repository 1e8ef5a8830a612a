"""The generation in force on this worker: its placement, its worker group, and the virtual workers that run here."""

from __future__ import annotations

from collections.abc import Sequence

from gyrostat.core.placement import Placement
from gyrostat.engine.transport.group import WorkerGroup


class CurrentGeneration:
    """Shared by all parts of the engine. Only `switch` changes it: at a fence, and in a recovery."""

    def __init__(self, placement: Placement, group: WorkerGroup, *, joining: bool = False) -> None:
        """`joining`: this worker is a newcomer, and belongs to no generation before the first `switch`."""
        self.switch(placement, group)
        self.joining = joining

    def switch(self, placement: Placement, group: WorkerGroup) -> None:
        self.joining = False
        self.placement, self.group = placement, group
        self.local_ranks: Sequence[int] = placement.held_by(group.rank)
        self.main_worker = placement.owner(0)
        """The worker that runs virtual worker 0."""

    @property
    def is_main(self) -> bool:
        """Virtual worker 0 runs here."""
        return 0 in self.local_ranks and not self.joining

    @property
    def has_others(self) -> bool:
        """Other workers are in the job, or it has not let this one in yet."""
        return self.joining or self.group.size > 1

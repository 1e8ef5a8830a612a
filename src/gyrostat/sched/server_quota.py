"""The cores and memory for parameter servers of each VC, and what its running jobs have of them. Pure.

A job's servers come and go with its devices: it takes them with its first device, and gives them back with the last one.
`SchedulerState` asks here before it places a job that does not run. Nobody is preempted for servers, and they are not lent.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyrostat.core.request import JobRequest
from gyrostat.core.roles import ServerCapacity

_NONE = ServerCapacity()


class ServerQuota:
    def __init__(self, capacity: Mapping[str, ServerCapacity | None]) -> None:
        """By VC; None: not limited."""
        self._capacity = capacity
        self._used: dict[str, ServerCapacity] = {}

    def fits(self, request: JobRequest) -> bool:
        """Whether the servers of a job that does not run fit now."""
        free = self.free(request.vc)
        return request.servers is None or free is None or request.servers.fits(free)

    def free(self, vc: str) -> ServerCapacity | None:
        """None: not limited."""
        capacity = self._capacity.get(vc)
        return None if capacity is None else capacity.without(self._used.get(vc, _NONE))

    def take(self, request: JobRequest) -> None:
        if request.servers is not None:
            self._used[request.vc] = self._used.get(request.vc, _NONE).plus(request.servers)

    def give_back(self, request: JobRequest) -> None:
        if request.servers is not None:
            self._used[request.vc] = self._used[request.vc].without(request.servers)

"""The cores and memory for parameter servers of one VC, and what its running jobs have of them. Pure.

A job's servers come and go with its devices: it takes them with its first device, and gives them back with the last one.
`SchedulerState` asks here before it places a job that does not run. Nobody is preempted for servers, and they are not lent.
"""

from __future__ import annotations

from gyrostat.core.request import JobRequest
from gyrostat.core.roles import ServerCapacity


class ServerQuota:
    def __init__(self, capacity: ServerCapacity | None) -> None:
        """None: not limited."""
        self._capacity = capacity
        self._used = ServerCapacity()

    def fits(self, request: JobRequest) -> bool:
        """Whether the servers of a job that does not run fit now."""
        free = self.free
        return request.servers is None or free is None or request.servers.fits(free)

    @property
    def free(self) -> ServerCapacity | None:
        """None: not limited."""
        return None if self._capacity is None else self._capacity.without(self._used)

    def take(self, request: JobRequest) -> None:
        if request.servers is not None:
            self._used = self._used.plus(request.servers)

    def give_back(self, request: JobRequest) -> None:
        if request.servers is not None:
            self._used = self._used.without(request.servers)

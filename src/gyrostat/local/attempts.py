"""The attempts to run one job in host processes of this machine: begun, cancelled, killed, and their results found.

All state that matters is in the job's directory (`host_files`): a daemon that is killed finds it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.core.devices import DeviceId, Devices
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.processes.confined import Beneath
from gyrostat.local.driver_messages import HostGone
from gyrostat.local.host_files import (
    HostOrder,
    end_fork_server,
    is_hosted,
    read_host,
    read_order,
    read_result,
    write_order,
)
from gyrostat.local.host_pool import HostPool, HostTask, HostTaskState

logger = logging.getLogger(__name__)


class Attempts:
    """For the thread of the job's driver."""

    def __init__(
        self,
        job: str,
        directory: Path,
        sockets: Path,
        *,
        spec: Callable[[], JobSpec],
        beneath: Beneath,
        slot: Callable[[DeviceId], Slot],
        last: int,
        record: Callable[[int], None],
        pool: HostPool,
    ) -> None:
        """`last`: the number of the last attempt that was begun. `record` makes the number of the next one durable."""
        self._job, self._directory, self._sockets, self._spec = job, directory, sockets, spec
        self._slot, self._record, self._pool, self._beneath = slot, record, pool, beneath
        self.number = last
        self._unreported = last + (read_result(directory, last) is not None)
        """The first attempt whose result was not reported. One that seemed to have been lost may still be made: its host was
        asked by a daemon that was killed, and is late."""
        self._task: HostTask | None = None
        """Of this daemon, if it has given the job to the pool."""
        self.killed: str | None = None
        """Why its host was killed by this daemon, if it was."""

    @property
    def spec(self) -> JobSpec:
        """As its owner wants it now."""
        return self._spec()

    def record_next(self) -> None:
        """Number the next attempt. Before `begin`: no host may have an attempt that is not recorded."""
        self.number += 1
        self._record(self.number)

    def begin(self, devices: Devices) -> None:
        """Give attempt `number` to a host. Raises `OSError` if that is impossible."""
        order = HostOrder(
            job=self._job,
            attempt=self.number,
            spec=self._spec(),
            slots=self.slots(devices),
            sockets=str(self._sockets),
            beneath=self._beneath,
        )
        write_order(self._directory, order)
        self._task = self._pool.send(self._directory, self.number)

    def slots(self, devices: Devices) -> tuple[Slot, ...]:
        return tuple(self._slot(device) for device in devices)

    def ordered_devices(self) -> Devices:
        """Those that the last attempt was begun on."""
        order = read_order(self._directory)
        return tuple(sorted(slot.device for slot in order.slots)) if order is not None else ()

    def cancel(self) -> bool:
        """No host will take it. False: one has or had it, or another daemon gave it to one."""
        return self._task is not None and self._pool.cancel(self._task)

    def kill(self, reason: str) -> None:
        """Kill its host, and end the fork server of its workers, which kills them."""
        self.killed, host = reason, read_host(self._directory)
        if host is not None and is_hosted(self._directory):
            logger.info("killing host %d: %s", host.host.pid, reason, extra={"job": self._job})
            host.host.end(timeout_s=5.0)
            end_fork_server(host)

    def find_end(self) -> HostGone | None:
        """The end of the current attempt, if no host has the job any more."""
        if is_hosted(self._directory):
            return None
        host = read_host(self._directory)
        newest = max(self.number, host.attempt if host is not None else 0)
        for attempt in range(newest, self._unreported - 1, -1):
            if (result := read_result(self._directory, attempt)) is not None:
                return self.end(result)
        taken = host is not None and host.attempt == self.number
        given_up = self._task is None or self._task.state is HostTaskState.OVER
        return self.end(None) if taken or given_up else None  # else no host has taken it yet

    def end(self, result: AttemptResult | None) -> HostGone:
        return HostGone(self._job, self.number, result, evicted=self.killed if result is None else None)

    def reported(self) -> None:
        """The end of the current attempt was reported."""
        self._unreported, self._task, self.killed = self.number + 1, None, None

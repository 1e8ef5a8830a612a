"""Events of the cluster that need no decision: what drivers report of their jobs, and how workers died (`incidents`). For the
loop's thread only."""

from __future__ import annotations

from typing import TypeAlias

from gyrostat.cluster.registry import Registry
from gyrostat.cluster.waiting import explain_holders
from gyrostat.core.plural import plural
from gyrostat.local.driver_messages import (
    DriverTrouble,
    JobBlocked,
    JobEvicted,
    JobMoved,
    MoveFailed,
    ServersScaled,
)
from gyrostat.local.home import Home
from gyrostat.local.incidents import IncidentKind, incidents_file, read_incidents

Noted: TypeAlias = JobMoved | ServersScaled | MoveFailed | JobEvicted | JobBlocked | DriverTrouble


class JobEvents:
    """Writes them to the registry. `grace`: seconds in which a job leaves devices that the scheduler takes from it."""

    def __init__(self, home: Home, registry: Registry, grace: float) -> None:
        self._home, self._registry, self._grace = home, registry, grace
        self._sizes: dict[str, int] = {}
        """Of the jobs' records of incidents, when they were last read."""

    def record_incidents(self, job: str) -> None:
        """Make those that its host has recorded since the last time events, each once."""
        record, directory = self._registry.get(job), self._home.job(job)
        try:
            size = incidents_file(directory).stat().st_size
            if self._sizes.get(job) == size:
                return
            incidents = read_incidents(directory, record.incidents)
        except OSError:
            return  # there are none, or they can be read later
        self._sizes[job] = size
        seen, deaths = record.incidents, record.worker_deaths
        for incident in incidents:
            seen, deaths = seen + 1, deaths + (incident.kind is IncidentKind.WORKER_DIED)
            self._registry.note(incident.kind, incident.text, record, incidents=seen, worker_deaths=deaths)

    def note(self, message: Noted) -> None:
        record = self._registry.get(message.job)
        if record.state.over:
            return
        match message:
            case JobMoved(_, before, after, pause):
                text = f"on {plural(len(after), 'device')}; training paused for {pause:.0f} ms"
                self._registry.note("moved", text, record, before, after)
            case ServersScaled(_, reason):
                self._registry.note("servers scaled", reason, record)
            case MoveFailed(_, reason):
                self._registry.note("not moved", reason, record)
            case JobEvicted(_, devices, reason):
                after = tuple(device for device in record.devices if device not in devices)
                self._registry.note("evicted", reason, record, devices, after)
            case JobBlocked(job, holders):
                self._block(job, explain_holders(holders, self._grace))
            case DriverTrouble(_, reason):
                self._registry.note("trouble", reason, record)

    def _block(self, job: str, reason: str) -> None:
        """It waits for jobs that have yet to leave its devices, unless its driver has started it meanwhile."""
        with self._registry.lock:
            record = self._registry.get(job)
            if not record.holds_devices and record.reason != reason:
                self._registry.move(job, None, reason, "blocked", before=record.devices)

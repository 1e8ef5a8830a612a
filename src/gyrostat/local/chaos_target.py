"""A cluster of its own as the target of `gyrostat chaos`: the job competes there with a copy of itself for the devices.

The daemon is killed and restarted; hosts, fork servers and workers are killed; both jobs are scaled, migrated, paused and
resumed. Both must end with the result of the undisturbed run.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gyrostat.cluster.client import ClusterClient
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import JobRecord, JobState
from gyrostat.core.errors import ClusterUnreachable, GyrostatError, UsageError
from gyrostat.job.chaos.plan import OF_CLUSTER, OF_WORKERS, Fault, FaultKind
from gyrostat.job.chaos.processes import MARK, RunProcesses
from gyrostat.job.chaos.target import Ended, ManagedProcess, RoundSettings
from gyrostat.local.home import Home
from gyrostat.local.host_files import HostFile, read_host

_NAMES = ("job", "rival")
_TIMEOUTS_S = 60.0
"""A move that a job refused is tried again after 2, 4 … 30 s, a job that could not start after 30 s."""
_POLL_S = 0.2
_RETRIES = 1000
_RESUME_S = 60.0


class ClusterTarget:
    """`gyrostat up` with two jobs."""

    def __init__(self, up: Sequence[str], settings: RoundSettings) -> None:
        """`up` is the command `gyrostat up`."""
        self._settings = settings
        self._home = Home(settings.directory / "state")
        devices = f"cpu:{settings.workers}" + ("" if settings.paced is None else f"@{settings.paced}")
        self._up = [*up, "--devices", devices, "--state", str(self._home.path), "--listen", "127.0.0.1:0"]
        self._up += ["--pass-env", MARK]
        self.kinds: Sequence[FaultKind] = (*OF_WORKERS, *OF_CLUSTER)
        self.records: Sequence[Path] = [settings.directory / name for name in _NAMES]
        self.timeouts_s = _TIMEOUTS_S
        self._jobs: dict[str, JobRecord] = {}
        self._reported: set[str] = set()
        self._closed = threading.Event()

    def start(self, processes: RunProcesses) -> None:
        self._processes = processes
        log = self._settings.directory / "daemon.log"
        self._daemon = ManagedProcess("the daemon", self._up, log, processes.environment())
        self._watcher = threading.Thread(target=self._watch, name="chaos cluster")
        self._watcher.start()

    def supervise(self) -> list[Ended]:
        ended = self._daemon.supervise()  # whatever its exit code: nobody has asked it to end
        found = [Ended(name=one.name, code=one.code or 1, last_lines=one.last_lines) for one in ended]
        for number, name in enumerate(_NAMES):
            job = self._jobs.get(name)
            if job is not None and job.state.over and name not in self._reported:
                self._reported.add(name)
                finished = job.state is JobState.FINISHED
                found.append(
                    Ended(
                        name=f"job {job.id} ({name}), {job.state}: {job.reason}",
                        code=0 if finished else job.exit_code or 1,
                        job=number,
                        digest=job.digest,
                        last_lines=job.last_lines,
                    )
                )
        return found

    @property
    def over(self) -> bool:
        return len(self._reported) == len(_NAMES)

    def fork_servers(self) -> list[int]:
        return [host.parent.pid for host in self._hosts() if host.parent is not None]

    def inject(self, fault: Fault) -> str | None:
        match fault.kind:
            case FaultKind.DAEMON:
                return f"the daemon for {fault.seconds:.2f} s" if self._daemon.kill(fault.seconds) else None
            case FaultKind.HOST:
                victims = [host.host.pid for host in self._hosts()]
            case FaultKind.HOST_FORK_SERVER:
                daemon = self._daemon.process.pid
                victims = [one.pid for one in self._processes.living() if one.parent == daemon]
            case _:
                with contextlib.suppress(GyrostatError), self._client() as client:
                    return self._request(client, fault)
                return None
        killed = [pid for pid in fault.victims(victims, 1) if self._processes.signal(pid, signal.SIGKILL)]
        return f"process {killed[0]}" if killed else None

    def resize(self, workers: int) -> str | None:
        size = min(workers, self._settings.workers)
        with contextlib.suppress(GyrostatError), self._client() as client:
            client.scale(_NAMES[0], 1, size)
            return f"{_NAMES[0]}: 1 to {size} devices"
        return None

    def close(self) -> None:
        """Nothing to ask: a cluster may be killed."""
        self._closed.set()
        self._processes.kill_all()
        self._watcher.join()

    # Implementation.

    def _request(self, client: ClusterClient, fault: Fault) -> str:
        job = fault.victims(_NAMES, 1)[0]
        if fault.kind is FaultKind.MIGRATE:
            return f"{job}: {client.migrate(job).text}"
        client.pause(job)
        self._closed.wait(fault.seconds)
        self._resume(job)
        return f"{job} for {fault.seconds:.2f} s"

    def _resume(self, job: str) -> None:
        """Again while the daemon does not answer."""
        until = time.monotonic() + _RESUME_S
        while not self._closed.wait(_POLL_S) and time.monotonic() < until:
            with contextlib.suppress(ClusterUnreachable), self._client() as client:
                client.resume(job)
                return

    def _hosts(self) -> list[HostFile]:
        """Those of running jobs."""
        found = (read_host(self._home.job(job.id)) for job in self._jobs.values() if not job.state.over)
        return [host for host in found if host is not None and host.host.alive()]

    def _client(self) -> ClusterClient:
        endpoint = self._home.endpoint()
        if endpoint is None:
            raise ClusterUnreachable("the daemon has not started yet")
        return ClusterClient(endpoint.url)

    def _watch(self) -> None:
        """In a thread: submit the jobs, then follow their states."""
        while not self._closed.wait(_POLL_S):
            with contextlib.suppress(ClusterUnreachable), self._client() as client:
                known = {job.name: job for job in client.jobs()}
                for name, records in zip(_NAMES, self.records, strict=True):
                    if name not in known:
                        known[name] = client.submit(self._spec(name, records))
                self._jobs = known

    def _spec(self, name: str, records: Path) -> JobSpec:
        settings = self._settings
        module, arguments = settings.recording_program(records)
        return JobSpec(
            script=module,
            module=True,
            args=arguments,
            name=name,
            virtual_workers=settings.virtual_workers,
            max=settings.workers,
            checkpoint_every=settings.checkpoint_every if settings.checkpoints else 0,
            retries=_RETRIES,
            workdir=str(Path.cwd()),
        )


def check_pace(paced: str | None) -> None:
    """Raise `UsageError` if devices of a cluster cannot be paced like this."""
    if paced is not None and "," in paced:
        raise UsageError(f"with --cluster all devices have one pace, got --paced {paced}")

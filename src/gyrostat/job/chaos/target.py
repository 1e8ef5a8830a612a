"""Where a job runs under faults: the interface that `job_run` drives, and a process that is restarted after it was killed."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyrostat.core.roles import ServerRecovery
from gyrostat.job.chaos.plan import Fault, FaultKind
from gyrostat.job.chaos.processes import RunProcesses
from gyrostat.job.chaos.record import JobTotals
from gyrostat.job.processes.protocol import Program

_LAST_LINES = 20
_INSIDE = "gyrostat.job.chaos.inside"


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """One run of the job."""

    program: Program
    virtual_workers: int
    workers: int
    directory: Path
    """Its own: records, logs, checkpoints and state."""
    number: int
    checkpoints: bool
    checkpoint_every: int
    paced: str | None = None
    servers: int = 0
    """Parameter servers; 0: a synchronous job."""
    server_recovery: ServerRecovery = ServerRecovery.EXACT

    @property
    def most_workers(self) -> int:
        """The most that a resize requests."""
        return self.virtual_workers if not self.servers else 2 * self.workers

    @property
    def most_servers(self) -> int:
        return 2 * self.servers

    def recording_program(self, directory: Path) -> tuple[str, tuple[str, ...]]:
        """The module that runs the program and records it in `directory`, and its arguments."""
        kind = "module" if self.program.module else "script"
        return _INSIDE, (str(directory), kind, self.program.name, *self.program.args)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process or a job that reported its end."""

    name: str
    code: int
    """The exit code; 0: it claims that the result is complete."""
    job: int = 0
    """Which of the target's jobs."""
    digest: str | None = None
    """The one it reported, if it reports one."""
    totals: JobTotals | None = None
    """Of a job with parameter servers that has ended well."""
    last_lines: Sequence[str] = ()


class ChaosTarget(Protocol):
    """Where the job runs. `inject` is called from several threads, all others from one."""

    kinds: Sequence[FaultKind]
    """The faults that it knows; `inject` gets those that do not concern workers and fork servers."""
    records: Sequence[Path]
    """A directory of records for each job."""
    timeouts_s: float
    """How long its own time-outs may stop training."""

    def start(self, processes: RunProcesses) -> None:
        """Start all processes, in `processes.environment()`."""

    def supervise(self) -> list[Ended]:
        """Restart the processes whose time has come. Returns what has ended since the last call."""

    @property
    def over(self) -> bool:
        """Everything has ended by itself."""

    def fork_servers(self) -> list[int]:
        """The process ids of the fork servers whose children are the workers."""

    def inject(self, fault: Fault) -> str | None:
        """Returns what was hit, or None: there was nothing. May wait."""

    def resize(self, workers: int) -> str | None:
        """Request this number of workers; returns the reply, or None: there was none. May wait."""

    def close(self) -> None:
        """Ask what still runs to end; the run kills what is left."""


class ManagedProcess:
    """A process that is started again after it was killed."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self._command, self._log, self._environment = name, command, log, environment
        self.reported = False
        """Its end by itself has been returned by `supervise`."""
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        self.restart_at: float | None = None

    @property
    def killed(self) -> bool:
        """It is to be restarted."""
        return self.restart_at is not None

    @property
    def ended(self) -> bool:
        """By itself."""
        return not self.killed and self.process.poll() is not None

    def kill(self, away: float) -> bool:
        """`supervise` restarts it after `away` seconds. False: it has ended, or is killed already."""
        if self.killed or self.process.poll() is not None:
            return False
        self.restart_at = math.inf  # first: otherwise its exit looks like its own
        self.process.kill()
        self.process.wait()
        self.restart_at = time.monotonic() + away
        return True

    def supervise(self) -> list[Ended]:
        """Restart it if its time has come; its end if that is new."""
        if self.restart_at is not None:
            if time.monotonic() >= self.restart_at:
                self.start()
        elif not self.reported and (code := self.process.poll()) is not None:
            self.reported = True
            return [Ended(name=self.name, code=code, last_lines=self.last_lines())]
        return []

    def start_again(self) -> None:
        """As its user does after it has ended and asked for it."""
        self.reported = False
        self.start()

    def last_lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]

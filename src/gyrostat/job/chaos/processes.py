"""All processes of a run, as targets of faults, from their very start.

They are found by an environment variable with the run's directory, which every process inherits: also fork servers and hosts
that have outlived their parents. Signals go through a pidfd that is opened before the process is identified, so they never
reach another process that got the same id later.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gyrostat.job import environment
from gyrostat.job.processes.fork_server import STORE_NAME

MARK = "GYROSTAT_CHAOS_RUN"
_FORK_SERVER = "gyrostat.job.processes.fork_server"
_STACKS_S = 2.0


@dataclass(frozen=True)
class RunProcess:
    """One process, as it was when it was looked for."""

    pid: int
    parent: int
    name: str
    command: str


class RunProcesses:
    """The processes of the run in one directory."""

    def __init__(self, directory: Path) -> None:
        self._mark = f"{MARK}={directory}"
        self._stopped: list[tuple[float, int]] = []

    def environment(self) -> Mapping[str, str]:
        """That in which processes of the run are started. Python processes print their stacks on SIGABRT."""
        name, _, value = self._mark.partition("=")
        return {**environment.variables(), name: value, "PYTHONFAULTHANDLER": "1"}

    def living(self) -> list[RunProcess]:
        """In the order of their process ids."""
        found = (self._look(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
        return sorted((process for process in found if process is not None), key=lambda process: process.pid)

    def fork_servers(self) -> list[int]:
        """Those that were started as processes of their own, not forked from a host."""
        servers = {
            process.pid: process.parent for process in self.living() if _FORK_SERVER in process.command
        }
        return [pid for pid, parent in servers.items() if parent not in servers]

    def workers(self, fork_servers: Collection[int]) -> list[int]:
        """Forked from these, and not stopped."""
        stopped = {pid for _, pid in self._stopped}
        return [
            one.pid
            for one in self.living()
            if one.parent in fork_servers and one.pid not in stopped and one.name != STORE_NAME
        ]

    def signal(self, pid: int, number: int) -> bool:
        """False: it has exited."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if self._look(pid) is None:
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True

    def stop(self, pid: int, seconds: float) -> bool:
        """Stop a process; `continue_stopped` continues it after this time."""
        if not self.signal(pid, signal.SIGSTOP):
            return False
        self._stopped.append((time.monotonic() + seconds, pid))
        return True

    def continue_stopped(self) -> None:
        """Continue the stopped processes whose time is over."""
        now = time.monotonic()
        due = [(until, pid) for until, pid in self._stopped if now >= until]
        for entry in due:
            self.signal(entry[1], signal.SIGCONT)
            self._stopped.remove(entry)

    def print_stacks(self) -> None:
        """End all Python processes; each prints the stacks of its threads before. Children first: parents forward output."""
        for process in reversed(self.living()):
            self.signal(process.pid, signal.SIGCONT)
            if "python" in process.command:
                self.signal(process.pid, signal.SIGABRT)
        deadline = time.monotonic() + _STACKS_S
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.05)

    def kill_all(self) -> None:
        """Until none is left: a process may be forked while others are killed."""
        while living := self.living():
            for process in living:
                self.signal(process.pid, signal.SIGKILL)
            time.sleep(0.01)

    def _look(self, pid: int) -> RunProcess | None:
        """None: it has ended, or is not of this run."""
        directory = Path(f"/proc/{pid}")
        try:
            if self._mark not in _strings(directory / "environ"):
                return None
            start, _, rest = (directory / "stat").read_text().rpartition(")")
            state, parent = rest.split()[:2]
            command = " ".join(_strings(directory / "cmdline"))
        except OSError:
            return None
        return None if state in "ZX" else RunProcess(pid, int(parent), start.partition("(")[2], command)


def _strings(path: Path) -> Iterator[str]:
    """The NUL-terminated strings in a file of /proc."""
    return (part.decode(errors="replace") for part in path.read_bytes().split(b"\0"))

"""The state directory of a cluster on this machine, readable by its owner only.

cluster.db        every job that was accepted (`store`)
daemon.lock       locked by the daemon while it lives
daemon.log        output of a daemon in the background, and of hosts
endpoint.json     the address of its API
run/              control sockets of running jobs
jobs/ID/          one job: orders and results of its hosts, logs, checkpoints (`host_files`)
recordings/       what the scheduler observed and decided, one file per start of the daemon (`sched.recording`)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyrostat.core.errors import UsageError
from gyrostat.core.files import write_atomically
from gyrostat.local.environment import state_directory

_OTHERS = 0o077


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the daemon's API."""

    url: str
    pid: int


@dataclass(frozen=True)
class Home:
    """The directory of one cluster."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "cluster.db"

    @property
    def lock(self) -> Path:
        return self.path / "daemon.lock"

    @property
    def log(self) -> Path:
        return self.path / "daemon.log"

    @property
    def sockets(self) -> Path:
        return self.path / "run"

    @property
    def control_sockets(self) -> Path:
        """Of running jobs: `job.control.control_socket` makes this directory below `sockets`."""
        return self.sockets / "gyrostat"

    @property
    def recordings(self) -> Path:
        return self.path / "recordings"

    def recording_files(self) -> list[Path]:
        """One per start of the daemon, the newest last."""
        return sorted(self.recordings.glob("*.jsonl"))

    def job(self, id_: str) -> Path:
        return self.path / "jobs" / id_

    def make(self) -> None:
        """Create the directories, and make them private."""
        for path in (self.path, self.sockets, self.recordings, self.path / "jobs"):
            try:
                self._check_ours()
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.stat().st_mode & _OTHERS:
                    path.chmod(0o700)
            except OSError as error:
                raise UsageError(
                    f"the cluster cannot keep its state in {path}: {error.strerror}; choose another place: --state DIR"
                ) from error

    def _check_ours(self) -> None:
        """A directory that others may enter and that has other files in it is not made private."""
        if not self.path.is_dir() or not self.path.stat().st_mode & _OTHERS or self.database.exists():
            return
        if any(self.path.iterdir()):
            raise UsageError(
                f"{self.path} is open to other users and has other files in it, so the cluster cannot keep its state there; "
                "choose a directory of its own: --state DIR"
            )

    # The address of the API.

    def endpoint(self) -> Endpoint | None:
        """Written by the last daemon, which may have ended since."""
        try:
            return msgspec.json.decode((self.path / "endpoint.json").read_bytes(), type=Endpoint)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def announce(self, url: str) -> None:
        write_atomically(self.path / "endpoint.json", msgspec.json.encode(Endpoint(url=url, pid=os.getpid())))

    def withdraw(self) -> None:
        (self.path / "endpoint.json").unlink(missing_ok=True)


def default_home() -> Home:
    return Home(state_directory())

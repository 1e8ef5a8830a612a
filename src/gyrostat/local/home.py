"""Where a cluster on this machine keeps everything: one directory, readable by its owner only.

cluster.db        every job that was ever accepted (`store`)
daemon.lock       locked by the daemon while it lives
daemon.log        what it says when it runs in the background
endpoint.json     where its API answers
run/              sockets of running jobs
jobs/ID/          one job: orders and results of its host, logs, checkpoints (`hosting`)
recordings/       what the scheduler saw and decided, one file per start of the daemon (`sched.recording`)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyrostat.core.errors import UsageError

STATE = "GYROSTAT_STATE_DIR"
_OTHERS = 0o077


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the daemon's API answers."""

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
    def doors(self) -> Path:
        """Of running jobs: what `job.door` makes below `sockets`."""
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
        """The directories, if they are not there yet; private even if they are."""
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
        """A directory that others may enter and that has more in it than a cluster is not made private unasked."""
        if not self.path.is_dir() or not self.path.stat().st_mode & _OTHERS or self.database.exists():
            return
        if any(self.path.iterdir()):
            raise UsageError(
                f"{self.path} is open to other users and has other files in it, so the cluster cannot keep its state there; "
                "choose a directory of its own: --state DIR"
            )

    # Where the API answers.

    def endpoint(self) -> Endpoint | None:
        """What the last daemon wrote; it may have gone since."""
        try:
            return msgspec.json.decode((self.path / "endpoint.json").read_bytes(), type=Endpoint)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def announce(self, url: str) -> None:
        write_whole(self.path / "endpoint.json", msgspec.json.encode(Endpoint(url=url, pid=os.getpid())))

    def withdraw(self) -> None:
        (self.path / "endpoint.json").unlink(missing_ok=True)


def default_home() -> Home:
    """$GYROSTAT_STATE_DIR, or a directory of this user's."""
    if given := os.environ.get(STATE):
        return Home(Path(given).absolute())
    base = os.environ.get("XDG_STATE_HOME")
    return Home((Path(base) if base else Path.home() / ".local" / "state") / "gyrostat")


def write_whole(path: Path, content: bytes) -> None:
    """Readers find the old content or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)

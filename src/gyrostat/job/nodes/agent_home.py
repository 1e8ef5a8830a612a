"""The runtime directory of one agent. An agent that is started again finds its predecessor's workers there."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.core.files import write_atomically


@contextlib.contextmanager
def locked_home(home: Path, name: str) -> Iterator[None]:
    """Hold the lock on `home`. Files of an agent that was killed are kept."""
    home.mkdir(mode=0o700, exist_ok=True)
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"an agent of {name!r} is running on this machine already; give this one another name: --node NAME"
            ) from None
        yield


class RunMarker:
    """The run that this node belongs to. The file exists until an agent ends by itself: one that was killed, and is started
    again, knows by it that the run was its own, even if that has ended meanwhile."""

    def __init__(self, home: Path) -> None:
        self._path = home / "run"

    def read(self) -> str | None:
        return self._path.read_text() if self._path.exists() else None

    def write(self, run: str) -> None:
        write_atomically(self._path, run.encode(), durable=False)

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)

"""The runtime directory of one agent. An agent that is started again finds its predecessor's workers there."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from gyrostat.core.errors import UsageError


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

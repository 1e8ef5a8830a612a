"""`run.json` in a checkpoint directory: the process that runs the job there, for requests of a checkpoint.

The file is locked while that process lives, however it ends. So a second run in the same directory is refused, and a file
that a killed run left is recognised.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gyrostat.core.errors import UsageError

NAME = "run.json"


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    program: str


@contextlib.contextmanager
def holding(directory: Path, program: str) -> Iterator[None]:
    """Hold the lock on `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / NAME
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = find(directory)
            who = f"process {other.pid} ({other.program})" if other else "another process"
            raise UsageError(
                f"{who} is running a job with the checkpoint directory {directory}; give this one its own"
            ) from None
        file.truncate(0)
        file.write(msgspec.json.encode(RunFile(pid=os.getpid(), program=program)))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def find(directory: Path) -> RunFile | None:
    """The run that uses this checkpoint directory now, if any."""
    try:
        with (directory / NAME).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return msgspec.json.decode(file.read(), type=RunFile)
            return None  # not locked: left by a run that was killed
    except (FileNotFoundError, msgspec.DecodeError):
        return None

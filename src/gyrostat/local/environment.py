"""Environment variables of a cluster on this machine: all are read and set here.

daemon, clients      state_directory, cluster_address, cluster_token
host fork server     fork_server_environment, temporary_variables
host                 set_runtime_directory
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

STATE, ADDRESS, TOKEN = "GYROSTAT_STATE_DIR", "GYROSTAT_CLUSTER", "GYROSTAT_TOKEN"


def state_directory() -> Path:
    """$GYROSTAT_STATE_DIR, or a directory of this user."""
    if given := os.environ.get(STATE):
        return Path(given).absolute()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "gyrostat"


def cluster_address() -> str | None:
    return os.environ.get(ADDRESS) or None


def cluster_token() -> str | None:
    return os.environ.get(TOKEN) or None


def fork_server_environment() -> dict[str, str]:
    """The daemon's, and the hash seed of workers, which are copies of copies of the host fork server."""
    return {"PYTHONHASHSEED": "0", **os.environ}


@contextlib.contextmanager
def temporary_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set these during the block. Afterwards the environment is as before."""
    before = dict(os.environ)
    os.environ.update(values)
    yield
    os.environ.clear()
    os.environ.update(before)


def set_runtime_directory(path: str) -> None:
    """For the control socket of the job that this process hosts."""
    os.environ["GYROSTAT_RUNTIME_DIR"] = path

"""Environment variables of the processes of a job: all that `job` reads and sets. `engine.environment` has those of the engine.

launcher, agent, clients     variables, runtime_base
agent                        variables: GYROSTAT_ETCD_… (`nodes.lease.address`)
worker                       set_variables, when it starts; rank, in `chaos`
verify                       hash_seed_fixed
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def variables() -> Mapping[str, str]:
    """All of this process, as they are now."""
    return os.environ


def set_variables(values: Mapping[str, str]) -> None:
    """Exactly these, in a worker that was forked from a process of another job."""
    os.environ.clear()
    os.environ.update(values)


def runtime_base() -> str | None:
    """The directory below which control sockets are, if one is set."""
    return os.environ.get("GYROSTAT_RUNTIME_DIR") or os.environ.get("XDG_RUNTIME_DIR") or None


def rank() -> int:
    """The number of this worker in its job."""
    return int(os.environ["RANK"])


def hash_seed_fixed() -> bool:
    """Whether all workers hash strings in the same way; so it is unless the user has set PYTHONHASHSEED=random."""
    return os.environ.get("PYTHONHASHSEED", "0").isdigit()

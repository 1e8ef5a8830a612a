"""The environment variables that the engine reads and sets in a worker process. No other module of the engine does.

| variable                 | set by                        | decides                                                 |
|--------------------------|-------------------------------|---------------------------------------------------------|
| `LOCAL_RANK`             | the launcher                  | which GPU of its machine a worker uses                  |
| `RANK`, `WORLD_SIZE` …   | the launcher, or torchrun     | nothing; `integrations` hides them from frameworks      |
| `GYROSTAT_SHARED_MEMORY` | the user: `0` switches it off | whether workers of one machine share memory (transport) |
| `ATEN_CPU_CAPABILITY` …  | the user, or `pin_variables`  | the worker's type of CPU, and its fingerprint           |

The last row stands for all variables by which torch's libraries choose instructions; `core/determinism.py` and
`numerics/fingerprint.py` name them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What the launcher sets, as torchrun does."""
_hidden: dict[str, str] = {}
SHARED_MEMORY = "GYROSTAT_SHARED_MEMORY"
LOCAL_RANK = "LOCAL_RANK"


@dataclass(frozen=True)
class WorkerEnvironment:
    """A worker's environment, with the type of each variable."""

    variables: Mapping[str, str]

    @property
    def local_rank(self) -> int:
        """The number of this worker among those of its machine; 0 if it was started by hand."""
        return int(self.variables.get(LOCAL_RANK, "0"))

    @property
    def shared_memory(self) -> bool:
        """Whether workers of one machine may exchange data through shared memory; the default."""
        return self.variables.get(SHARED_MEMORY, "1") != "0"


def worker_environment() -> WorkerEnvironment:
    """The environment of this process as it is now."""
    return WorkerEnvironment(_hidden | os.environ)


def hide_launcher() -> None:
    """Take away the launcher's variables, by which a framework would bring up a process group. The engine remembers them."""
    for name in _LAUNCHER:
        if name in os.environ:
            _hidden[name] = os.environ.pop(name)


def launched_by_others() -> bool:
    """Whether torchrun, or a launcher like it, has started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def pin_variables(variables: Mapping[str, str], *, keep_existing: bool = False) -> None:
    """Set variables that torch's libraries read. `keep_existing`: only those that are not set yet."""
    for name, value in variables.items():
        if not (keep_existing and name in os.environ):
            os.environ[name] = value

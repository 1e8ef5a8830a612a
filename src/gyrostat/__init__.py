"""gyrostat: elastic PyTorch training with the bits of plain DDP on N fixed workers.

`init` joins this process's job; `digest` fingerprints any training state; `shards` and `batch_end` feed the loop of any other
framework; `servers` keeps parameters on servers. Importing this module does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyrostat.core.errors import GyrostatError
    from gyrostat.data.shards.loop import batch_end, shards
    from gyrostat.engine.reduce.hook import tree_hook
    from gyrostat.engine.script.job import Job
    from gyrostat.engine.script.session import init
    from gyrostat.engine.state.digest import digest
    from gyrostat.ps.script.servers import servers

__version__ = "0.1.0"
__all__ = [
    "GyrostatError",
    "Job",
    "__version__",
    "batch_end",
    "digest",
    "init",
    "servers",
    "shards",
    "tree_hook",
]

_HOMES = {
    "GyrostatError": "gyrostat.core.errors",
    "Job": "gyrostat.engine.script.job",
    "batch_end": "gyrostat.data.shards.loop",
    "digest": "gyrostat.engine.state.digest",
    "init": "gyrostat.engine.script.session",
    "servers": "gyrostat.ps.script.servers",
    "shards": "gyrostat.data.shards.loop",
    "tree_hook": "gyrostat.engine.reduce.hook",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gyrostat' has no attribute {name!r}")

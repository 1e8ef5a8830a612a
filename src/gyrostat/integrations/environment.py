"""The environment variables of frameworks that integrations read. `engine.environment` hides those of the launcher.

| variable          | set by                                    | decides                                         |
|-------------------|-------------------------------------------|-------------------------------------------------|
| `PL_GLOBAL_SEED`  | Lightning's `seed_everything`             | the seed of its samplers                        |
| `PL_SEED_WORKERS` | Lightning's `seed_everything(workers=…)`  | whether its data workers are seeded by rank     |
"""

from __future__ import annotations

import os


def lightning_seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def lightning_seeds_workers() -> bool:
    return bool(int(os.environ.get("PL_SEED_WORKERS", "0")))

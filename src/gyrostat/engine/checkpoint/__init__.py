"""Checkpoints: one copy of shared state, the contexts of all N virtual workers, and the place in the script.

A checkpoint is a directory `step-00000120` of three files: two safetensors files and a manifest with the rest
and with checksums. `store.py` writes them so that a cut-off at any instant leaves the previous ones intact,
and finds the newest that is whole and of this job; `read.py` reads and checks a single one. `manifest.py` and
`tensorfile.py` are the formats, `disk.py` is the seam through which every change to the file system goes.
`schedule.py` decides when one is taken, and `writer.py` writes it behind the training that goes on, from a copy in host
memory (`hostcopy.py`) of which a part is made late (`latecopy.py`).

Nothing in a checkpoint knows how many workers wrote it.
"""

from gyrostat.engine.checkpoint.disk import Disk
from gyrostat.engine.checkpoint.read import Description, describe, load, verify
from gyrostat.engine.checkpoint.schedule import CheckpointSchedule
from gyrostat.engine.checkpoint.snapshot import Found, JobSnapshot
from gyrostat.engine.checkpoint.store import CheckpointStore, list_checkpoints
from gyrostat.engine.checkpoint.writer import Discarded, Writer, Written

__all__ = [
    "CheckpointStore",
    "Description",
    "Discarded",
    "Disk",
    "Found",
    "JobSnapshot",
    "CheckpointSchedule",
    "Writer",
    "Written",
    "describe",
    "list_checkpoints",
    "load",
    "verify",
]

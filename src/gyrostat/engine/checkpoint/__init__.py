"""Checkpoints: one copy of shared state, the contexts of all N virtual workers, and the place in the script.

A checkpoint is a directory `step-00000120` of three files: two safetensors files, and a manifest with everything else and
with checksums. It does not depend on the number of workers that wrote it.

    manager.py      when a job takes, writes and resumes from checkpoints; `schedule.py` is its decision, `capture.py` its state
    writer.py       writes a checkpoint in the background while training continues, from a copy in host memory (`hostcopy.py`)
                    of which a part is made late (`latecopy.py`)
    store.py        the checkpoints in a directory: writes one so that an interruption leaves the previous ones intact, and
                    finds the newest that is complete and of this job
    read.py         reads and checks a single checkpoint
    snapshot.py     the content of a checkpoint
    manifest.py, tensorfile.py     the file formats
    disk.py         every call that changes the file system; `faultydisk.py` fails on purpose
    exchange.py     imports files of other programs, and exports state_dicts
"""

from gyrostat.engine.checkpoint.disk import Disk
from gyrostat.engine.checkpoint.read import Description, describe, load, verify
from gyrostat.engine.checkpoint.schedule import CheckpointSchedule, CheckpointTimer
from gyrostat.engine.checkpoint.snapshot import Found, JobSnapshot
from gyrostat.engine.checkpoint.store import CheckpointStore
from gyrostat.engine.checkpoint.writer import Discarded, Writer, Written

__all__ = [
    "CheckpointStore",
    "Description",
    "Discarded",
    "Disk",
    "Found",
    "JobSnapshot",
    "CheckpointSchedule",
    "CheckpointTimer",
    "Writer",
    "Written",
    "describe",
    "load",
    "verify",
]

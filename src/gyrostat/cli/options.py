"""What the options of `run` and `verify` mean together. Pure: options in, a placement and a policy out, or
what is wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

from gyrostat.core.determinism import parse_pool
from gyrostat.core.errors import NotYet, UsageError
from gyrostat.core.job import CheckpointPolicy, Determinism, Pool
from gyrostat.core.placement import Placement


def parse_counts(text: str) -> list[int]:
    """`3,1`: so many virtual workers on each worker."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--placement takes the number of virtual workers of each worker, such as 3,1; got {text!r}"
        ) from None


def choose_placement(
    virtual_workers: int | None, workers: int | None, placement: str | None
) -> tuple[Placement, bool]:
    """The placement, and whether the command line fixes the number of virtual workers (or the script may)."""
    if placement is None:
        given = virtual_workers is not None
        workers = 1 if workers is None else workers
        return Placement.even(workers if virtual_workers is None else virtual_workers, workers), given
    counts = parse_counts(placement)
    if workers is not None and workers != len(counts):
        raise UsageError(
            f"--placement {placement} is for {len(counts)} workers, but --workers says {workers}"
        )
    if virtual_workers is not None and virtual_workers != sum(counts):
        raise UsageError(
            f"--placement {placement} places {sum(counts)} virtual workers, "
            f"but --virtual-workers says {virtual_workers}"
        )
    return Placement.from_counts(counts), True


def choose_checkpoint(directory: Path | None, every: int, keep: int, resume: bool) -> CheckpointPolicy | None:
    """Where and when to checkpoint."""
    if every < 0 or keep < 1:
        raise UsageError(f"--checkpoint-every must be 0 or more and --keep 1 or more, got {every} and {keep}")
    if directory is None:
        if every:
            raise UsageError("--checkpoint-every needs --checkpoint-dir DIR: where should they be written?")
        return None
    return CheckpointPolicy(directory=os.path.abspath(directory), every=every, keep=keep, resume=resume)


def choose_pool(determinism: Determinism, pool: str | None, threads: int) -> Pool | None:
    """The device types that a job may mix; only one that is `heterogeneous` has any to declare."""
    if determinism is not Determinism.HETEROGENEOUS:
        if pool is not None:
            raise UsageError(f"--pool {pool} is for --determinism heterogeneous; this job is {determinism}")
        return None
    if pool is None:
        raise UsageError(
            "--determinism heterogeneous needs the device types that the job may use, such as --pool avx512,avx2: "
            "all compute with what the weakest of them has"
        )
    return parse_pool(pool, threads=threads)


def check_available(schedule: str | None) -> None:
    """Refuse what this version does not have yet, and say what it has instead."""
    if schedule is not None:
        raise NotYet(
            "--schedule comes in a later version; until then, change the number of workers between runs: "
            "--checkpoint-dir DIR, and the next run resumes on any --workers P with the same bits"
        )

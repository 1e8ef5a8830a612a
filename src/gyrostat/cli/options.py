"""What the options of `run` and `verify` mean together. Pure: options in, a placement and a policy out, or
what is wrong.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from gyrostat.core.determinism import parse_pool
from gyrostat.core.errors import UsageError
from gyrostat.core.job import CheckpointPolicy, Determinism, DevicePool
from gyrostat.core.placement import Placement
from gyrostat.job.control.control_socket import check_name


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


def choose_pool(determinism: Determinism, pool: str | None, threads: int) -> DevicePool | None:
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


def choose_schedule(
    text: str | None, virtual_workers: int | None, workers: int | None, placement: str | None
) -> tuple[int | None, tuple[tuple[int, int], ...]]:
    """`0:2,50:4,100:1`: the number of workers to begin with, and (step, workers) of every change after that."""
    if text is None:
        return workers, ()
    if placement is not None:
        raise UsageError(
            f"--placement {placement} is for a fixed number of workers, but there is --schedule {text}"
        )
    entries = [_parse_entry(entry, text) for entry in text.split(",")]
    steps = [step for step, _ in entries]
    if steps != sorted(set(steps)) or steps[0] < 0:
        raise UsageError(f"the steps of --schedule must go up from 0, each once; got {text!r}")
    for step, count in entries:
        if count < 1 or (virtual_workers is not None and count > virtual_workers):
            raise UsageError(
                f"--schedule {text} wants {count} workers at step {step}; there can be 1 to as many as there are virtual "
                f"workers ({virtual_workers or 'say how many: --virtual-workers N'})"
            )
    if steps[0] == 0:
        if workers is not None and workers != entries[0][1]:
            raise UsageError(
                f"--schedule {text} begins with {entries[0][1]} workers, but --workers says {workers}"
            )
        workers = entries.pop(0)[1]
    if virtual_workers is None:
        raise UsageError("--schedule needs --virtual-workers N: the number that stays the same")
    return workers, tuple(entries)


def _parse_entry(entry: str, text: str) -> tuple[int, int]:
    try:
        step, workers = entry.split(":")
        return int(step), int(workers)
    except ValueError:
        raise UsageError(
            f"--schedule takes STEP:WORKERS pairs such as 0:2,50:4,100:1; {entry!r} in {text!r} is none"
        ) from None


def parse_paced(text: str | None) -> tuple[float, ...]:
    """`200`, or `200,150`: samples per second of each worker; the last number goes for all that follow."""
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--paced takes samples per second, one number for all workers or 200,150,…; got {text!r}"
        ) from None


def choose_name(name: str | None, script: str) -> str:
    """By which others find the running job: what the user says, or the script's name and this process's number."""
    if name is not None:
        check_name(name)
        return name
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-._") or "job"
    return f"{plain[:48]}-{os.getpid()}"

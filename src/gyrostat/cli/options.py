"""Interpretation of the options of `gyrostat run`. Pure: option values in, a placement, policy or `UsageError` out."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.core.job import CheckpointPolicy, Determinism, DevicePool
from gyrostat.core.placement import Placement
from gyrostat.core.plural import plural


def parse_counts(text: str) -> list[int]:
    """`3,1`: the number of virtual workers on each worker."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--placement takes the number of virtual workers of each worker, such as 3,1; got {text!r}"
        ) from None


def choose_placement(
    virtual_workers: int | None, workers: int | None, placement: str | None
) -> tuple[Placement, bool]:
    """The placement, and whether the number of virtual workers is fixed (otherwise the script may set it)."""
    if placement is None:
        given = virtual_workers is not None
        workers = 1 if workers is None else workers
        return Placement.even(workers if virtual_workers is None else virtual_workers, workers), given
    counts = parse_counts(placement)
    if workers is not None and workers != len(counts):
        raise UsageError(
            f"--placement {placement} is for {plural(len(counts), 'worker')}, but --workers says {workers}"
        )
    if virtual_workers is not None and virtual_workers != sum(counts):
        raise UsageError(
            f"--placement {placement} places {plural(sum(counts), 'virtual worker')}, "
            f"but --virtual-workers says {virtual_workers}"
        )
    return Placement.from_counts(counts), True


def choose_checkpoint(
    directory: Path | None, every: int, interval_s: float, keep: int, resume: bool
) -> CheckpointPolicy | None:
    """Directory and intervals of checkpoints; None without a directory."""
    if every < 0 or keep < 1:
        raise UsageError(f"--checkpoint-every must be 0 or more and --keep 1 or more, got {every} and {keep}")
    if not 0 <= interval_s < math.inf:
        raise UsageError(f"--checkpoint-interval must be 0 or more seconds, got {interval_s:g}")
    if directory is None:
        if every or interval_s:
            option = "--checkpoint-every" if every else "--checkpoint-interval"
            raise UsageError(f"{option} needs --checkpoint-dir DIR")
        return None
    return CheckpointPolicy(
        directory=os.path.abspath(directory), every=every, interval_s=interval_s, keep=keep, resume=resume
    )


def choose_pool(determinism: Determinism, pool: str | None, threads: int) -> DevicePool | None:
    """The device types that a heterogeneous job may mix; None for other determinism levels."""
    if determinism is not Determinism.HETEROGENEOUS:
        if pool is not None:
            raise UsageError(f"--pool {pool} is for --determinism heterogeneous; this job is {determinism}")
        return None
    if pool is None:
        raise UsageError(
            "--determinism heterogeneous needs the device types that the job may use, such as --pool avx512,avx2: "
            "all of them compute with the instructions of the weakest one"
        )
    from gyrostat.core.determinism import parse_pool

    return parse_pool(pool, threads=threads)


def choose_schedule(
    text: str | None, virtual_workers: int | None, workers: int | None, placement: str | None
) -> tuple[int | None, tuple[tuple[int, int], ...]]:
    """`0:2,50:4,100:1`: the initial number of workers, and (step, workers) of every later change."""
    if text is None:
        return workers, ()
    if placement is not None:
        raise UsageError(
            f"--placement {placement} is for a fixed number of workers; it excludes --schedule {text}"
        )
    entries = parse_schedule_entries(text)
    steps = [step for step, _ in entries]
    for step, count in entries:
        if count < 1 or (virtual_workers is not None and count > virtual_workers):
            raise UsageError(
                f"--schedule {text} has {plural(count, 'worker')} at step {step}; the number of workers is 1 to the number of "
                f"virtual "
                f"workers ({virtual_workers or 'set it with --virtual-workers N'})"
            )
    if steps[0] == 0:
        if workers is not None and workers != entries[0][1]:
            raise UsageError(
                f"--schedule {text} begins with {plural(entries[0][1], 'worker')}, but --workers says {workers}"
            )
        workers = entries.pop(0)[1]
    if virtual_workers is None:
        raise UsageError("--schedule needs --virtual-workers N, which stays constant")
    return workers, tuple(entries)


def parse_schedule_entries(text: str) -> list[tuple[int, int]]:
    """(step, workers), by increasing step."""
    entries = [_parse_entry(entry, text) for entry in text.split(",")]
    steps = [step for step, _ in entries]
    if steps != sorted(set(steps)) or steps[0] < 0:
        raise UsageError(f"the steps of --schedule must increase, from 0 or more; got {text!r}")
    return entries


def _parse_entry(entry: str, text: str) -> tuple[int, int]:
    try:
        step, workers = entry.split(":")
        return int(step), int(workers)
    except ValueError:
        raise UsageError(
            f"--schedule takes STEP:WORKERS pairs such as 0:2,50:4,100:1; {entry!r} in {text!r} is not such a pair"
        ) from None


def parse_paced(text: str | None) -> tuple[float, ...]:
    """`200`, or `200,150`: samples per second of each worker; the last value applies to all further workers."""
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--paced takes samples per second, one number for all workers or 200,150,…; got {text!r}"
        ) from None


def choose_name(name: str | None, script: str) -> str:
    """The name of the running job. Default: script name and process id."""
    if name is not None:
        from gyrostat.job.control.control_socket import check_name

        check_name(name)
        return name
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-._") or "job"
    return f"{plain[:48]}-{os.getpid()}"

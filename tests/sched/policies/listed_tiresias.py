"""Tiresias' public simulator, told again: queues are lists, and every event walks all of them. Slow, and short enough to check.

At an event, ended jobs go, new ones go to the end of the first list, and running jobs that have reached their list's threshold
go to the end of the next one. Then all lists are walked in order: a job runs if it fits into the devices that are left. After
that, each list has its running jobs first; otherwise its order stays.

The public simulator has one fault, `late`: the time of a demotion is computed as if the job's seconds so far were its
device-seconds, so a job of several devices falls only at a later event. What it recorded has that fault; our policy has not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROUNDING = 1e-6


@dataclass(eq=False, kw_only=True)
class ListedJob:
    id: str
    devices: int
    submitted: float
    duration: float
    executed: float = 0.0
    queue: int = 0
    running: bool = False
    finished: float = math.nan
    preemptions: int = 0


def run_listed(
    jobs: Iterable[ListedJob],
    *,
    devices: int,
    thresholds: Sequence[float],
    late: bool = False,
    yields: bool = True,
) -> dict[str, ListedJob]:
    """Run all jobs to their end. Without `yields`, a running job that falls goes before the waiting ones of its new list."""
    coming = sorted(jobs, key=lambda job: job.submitted)
    everything = {job.id: job for job in coming}
    lists: list[list[ListedJob]] = [[] for _ in range(len(thresholds) + 1)]
    active: list[ListedJob] = []
    now = end = fall = math.inf
    while coming or active:
        following = min(end, fall, coming[0].submitted if coming else math.inf)
        assert following < math.inf, "a job is too large for the cluster"
        for job in active:
            job.executed += (following - now) * job.running
        now = following
        for job in [job for job in active if job.running and job.duration - job.executed <= _ROUNDING]:
            job.finished = now
            active.remove(job)
            lists[job.queue].remove(job)
        while coming and coming[0].submitted <= now:
            active.append(coming[0])
            lists[0].append(coming.pop(0))
        for job in active:
            limit = thresholds[job.queue] if job.queue < len(thresholds) else math.inf
            if job.running and job.executed * job.devices >= limit - _ROUNDING:
                lists[job.queue].remove(job)
                job.queue += 1
                lists[job.queue].append(job)
        _walk(lists, devices, yields)
        running = [job for job in active if job.running]
        end = min((now + job.duration - job.executed for job in running), default=math.inf)
        falling = [(job, thresholds[job.queue]) for job in running if job.queue < len(thresholds)]
        falls: list[float]
        if late:
            falls = [math.ceil((limit - job.executed) / job.devices) for job, limit in falling]
        else:
            falls = [limit / job.devices - job.executed for job, limit in falling]
        fall = now + min(falls, default=math.inf)
    return everything


def _walk(lists: Sequence[list[ListedJob]], devices: int, yields: bool) -> None:
    free = devices
    for jobs in lists:
        if not yields:
            jobs.sort(key=lambda job: not job.running)
        for job in jobs:
            fits = job.devices <= free
            job.preemptions += job.running and not fits
            job.running = fits
            free -= job.devices * fits
        jobs.sort(key=lambda job: not job.running)

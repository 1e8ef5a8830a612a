"""Gavel's least-attained-service policy (Narayanan et al., OSDI 2020, §4.1): fairness by each job's speed on each type.

A linear program computes the share of its time that each job should spend on each device type, so that the smallest
normalised throughput, relative to an equal share of the cluster, is as large as possible:

    maximise  t + a little of all throughput
    t  <=  s_m / w_m  sum_j T_mj X_mj / (what an equal share would give m)      for each job m with s_m devices and weight w_m
    sum_j X_mj <= 1,      sum_m s_m X_mj <= devices of type j

Equal jobs have the same solution, so the program has one row per class of jobs. Devices are then allocated in rounds of
`round` seconds: in each, type by type, the jobs farthest below their shares X of that type come first. A job runs on exactly
the number of devices that it requests, of one type. Where no job has devices, a round begins at once.

When jobs have come or gone, shares are computed again, at most every `reset` seconds, and the time that jobs have had so far
no longer counts, as in Gavel's own scheduler: otherwise a long job would owe others the time before they came. A job that
comes in between has no share until then, and gets devices that others leave.

With `mixed` (VirtualFlow §6.5.2), devices that a round leaves idle go to the jobs that may use several types and gain most;
in the next round they are free for waiting jobs again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from gyrostat.core.errors import UsageError
from gyrostat.core.request import JobId
from gyrostat.sched.policies.proposals import TentativeAllocation, grow
from gyrostat.sched.policies.steady import DeviceTargets, fits_besides
from gyrostat.sched.policy import BeginRound, Policy, PolicyActions, Promote, ResetService, RunOn, Wake
from gyrostat.sched.views import JobView, Key, SchedulingRound, VcView

_ROUNDING = 1e-6
_A_LITTLE = 1e-3  # of all throughput, so that devices that fairness leaves over are used well


@dataclass(frozen=True)
class JobClass:
    """A class of equal jobs: their number, devices of each, weight, and speed by type."""

    jobs: int
    devices: int
    weight: float
    speeds: tuple[float, ...]


class Gavel(Policy):
    def __init__(self, *, mixed: bool = False, round: float = 360.0, reset: float = 1920.0) -> None:
        if round <= 0:
            raise UsageError(f"round must be more than 0 seconds, got {round}")
        if reset < 0:
            raise UsageError(
                f"reset must be 0 or more seconds between two computations of shares, got {reset}"
            )
        self.mixed = mixed
        self.round = round
        self.reset = reset

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        return (job.request.submitted,), math.inf

    def decide(self, view: VcView, now: float) -> PolicyActions:
        if not view.jobs:
            return
        ends = view.round.began + self.round
        if len(view.holding) and now < ends - _ROUNDING * self.round:
            yield Wake(ends)
            return
        yield Wake(now + self.round)
        jobs = frozenset(view.jobs)
        due = now >= view.round.computed + self.reset - _ROUNDING * self.round
        if jobs != view.round.jobs and (due or not len(view.holding)):
            for job in view.jobs.values():
                yield ResetService(job)
            yield BeginRound(SchedulingRound(now, now, jobs))
        else:
            yield BeginRound(replace(view.round, began=now))
        wanted = self.assign(view, now)
        for job in list(view.holding):
            counts = wanted.devices.get(job.id, {})
            if any(number > counts.get(type_, 0) for type_, number in job.counts.items()):
                kept = {
                    type_: min(n, job.counts[type_]) for type_, n in counts.items() if type_ in job.counts
                }
                yield RunOn(job, kept, wanted.reasons.get(job.id, "its share of this round is over"))
        for id_, counts in wanted.devices.items():
            job, reason = view.jobs[id_], wanted.reasons[id_]
            if job.borrowed_counts == counts and not job.devices and (yield Promote(job, reason)):
                continue
            if job.borrowed and not fits_besides(job, counts):
                yield RunOn(job, {}, "gets guaranteed devices", borrowed=True)
            yield RunOn(job, counts, reason)

    def assign(self, view: VcView, now: float) -> DeviceTargets:
        """The devices of each job for one round."""
        types = tuple(view.capacity)
        shares = self._shares(view, types)
        wanted = DeviceTargets()
        free = dict(view.capacity)
        for position, type_ in enumerate(types):
            behind = []
            for job in view.jobs.values():
                if job.id in wanted.devices or view.rate(job, {type_: job.request.devices}) <= 0:
                    continue
                share = shares[job.id][position] if job.id in shares else 0.0
                attained = job.recent_seconds_on(type_, now) + self.round / 2
                behind.append((-share / attained, -share, set(job.counts) != {type_}, job.number, job))
            for _, share, *_, job in sorted(behind, key=lambda each: each[:4]):
                if free[type_] >= job.request.devices:
                    wanted.devices[job.id] = {type_: job.request.devices}
                    wanted.reasons[job.id] = f"furthest behind its share of {-share:.0%} on {type_}"
                    free[type_] -= job.request.devices
        if self.mixed and any(free.values()):
            self._mix(view, wanted, free)
        return wanted

    def _mix(self, view: VcView, wanted: DeviceTargets, free: dict[str, int]) -> None:
        table = TentativeAllocation(view, mixed=True)
        table.free, table.assignment = free, wanted
        grow(table, [view.jobs[id_] for id_ in wanted.devices if view.jobs[id_].request.elastic])

    def _shares(self, view: VcView, types: Sequence[str]) -> Mapping[JobId, Sequence[float]]:
        kinds: dict[tuple[object, ...], list[JobView]] = defaultdict(list)
        for job in (job for job in view.jobs.values() if job.id in view.round.jobs):
            speeds = tuple(view.rate(job, {type_: job.request.devices}) for type_ in types)
            fits = tuple(
                speed if job.request.devices <= view.capacity[type_] else 0.0
                for speed, type_ in zip(speeds, types, strict=True)
            )
            kinds[job.request.devices, job.request.weight, fits].append(job)
        rows = [JobClass(len(jobs), *key) for key, jobs in kinds.items()]  # type: ignore[arg-type]
        solved = max_min_shares(tuple(rows), tuple(view.capacity[type_] for type_ in types))
        return {job.id: solved[row] for row, jobs in enumerate(kinds.values()) for job in jobs}


@lru_cache(maxsize=4096)  # most rounds have the jobs of the previous round
def max_min_shares(kinds: tuple[JobClass, ...], devices: tuple[int, ...]) -> list[list[float]]:
    """X: by class, the share of time that each of its jobs spends on each type."""
    types, total = len(devices), sum(devices)
    usable = [any(kind.speeds) for kind in kinds]
    if not any(usable):
        return [[0.0] * types for _ in kinds]
    columns = len(kinds) * types + 1  # X row by row, then t
    rows: list[int] = []
    cols: list[int] = []
    values: list[float] = []
    limits: list[float] = []
    objective = np.zeros(columns)
    objective[-1] = -1.0

    def entry(row: int, column: int, value: float) -> None:
        rows.append(row)
        cols.append(column)
        values.append(value)

    jobs = sum(kind.jobs for kind in kinds)
    for k, kind in enumerate(kinds):
        equal = sum(speed * number / total for speed, number in zip(kind.speeds, devices, strict=True))
        if usable[k]:
            row = len(limits)
            entry(row, columns - 1, 1.0)
            for j, speed in enumerate(kind.speeds):
                worth = kind.devices / kind.weight * speed / equal
                entry(row, k * types + j, -worth)
                objective[k * types + j] = -_A_LITTLE * kind.jobs / jobs * speed / equal
            limits.append(0.0)
        row = len(limits)
        for j in range(types):
            entry(row, k * types + j, 1.0)
        limits.append(1.0)
    for j, number in enumerate(devices):
        row = len(limits)
        for k, kind in enumerate(kinds):
            entry(row, k * types + j, float(kind.jobs * kind.devices))
        limits.append(float(number))
    solution = linprog(
        objective,
        A_ub=csr_matrix((values, (rows, cols)), shape=(len(limits), columns)),
        b_ub=limits,
        bounds=(0, None),
        method="highs",
    )
    if not solution.success:
        raise AssertionError(f"the program always has a solution (all shares 0), but: {solution.message}")
    return [[float(x) for x in solution.x[k * types : (k + 1) * types]] for k in range(len(kinds))]

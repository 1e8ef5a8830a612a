"""Elastic weighted fair sharing: VirtualFlow's Algorithm 1 (§4.2).

Running jobs share all devices in proportion to their weights, within the minimum and the maximum of each. Waiting jobs are
admitted one by one, the highest priority first, as long as that takes no device from a job of higher priority. Weights,
which are priorities too, come from `by`: `priority` (the job's own), `sjf` (one over its whole work) or `srtf` (one over its
remaining work). Inelastic jobs get exactly the devices that they request, and keep them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from gyrostat.core.errors import UsageError
from gyrostat.core.request import JobId
from gyrostat.sched.policies.proposals import grow_borrowed
from gyrostat.sched.policies.steady import DeviceTargets, SteadyPolicy, limit
from gyrostat.sched.policy import Policy, PolicyActions
from gyrostat.sched.views import JobView, Key, VcView

ORDERS = ("priority", "sjf", "srtf")


@dataclass(frozen=True)
class Claim:
    """The claim of one job: a weight, and the limits of its share unless that is 0."""

    weight: float
    least: int
    most: int


class FairShare(SteadyPolicy):
    def __init__(self, *, by: str = "priority", price: float = 0.0, hold: float = 0.0) -> None:
        super().__init__(price=price, hold=hold)
        if by not in ORDERS:
            raise UsageError(f"fair shares are weighted by {', '.join(ORDERS)}; not by {by!r}")
        self.by = by

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        return (-self.weight(job, now), job.request.submitted), math.inf

    def weight(self, job: JobView, now: float) -> float:
        if self.by == "priority":
            return max(job.request.priority, 1) * job.request.weight
        work = job.request.work if self.by == "sjf" else job.remaining(now)
        return 1.0 if work is None else 1 / max(work, 1e-9)

    def assign(self, view: VcView, now: float) -> DeviceTargets:
        total = sum(view.capacity.values())
        running = list(view.holding)
        claims = {job.id: self._claim(job, now) for job in running}
        shares = fair_shares(claims, total)
        admitted = list(running)
        queue = sorted((*view.waiting, *view.borrowing), key=lambda each: self.rank(each, now)[0])
        for weight, group in groupby(queue, key=lambda each: self.weight(each, now)):
            candidates = list(group)
            number, claims, shares = self._admit(claims, shares, candidates, weight, total, now)
            admitted += candidates[:number]
            if number < len(candidates):
                break
        reasons = {id_: f"fair share {share} of {total}" for id_, share in shares.items()}
        return DeviceTargets(by_type(view, admitted, shares), reasons)

    def _admit(
        self,
        claims: Mapping[JobId, Claim],
        shares: dict[JobId, int],
        candidates: Sequence[JobView],
        weight: float,
        total: int,
        now: float,
    ) -> tuple[int, dict[JobId, Claim], dict[JobId, int]]:
        """Admit as many candidates of one weight, in order, as get a share without taking from a job of higher weight.

        The more are admitted, the smaller the shares, so the number is found by doubling and halving.
        """

        def sharing(number: int) -> tuple[int, dict[JobId, Claim], dict[JobId, int]] | None:
            with_them = {**claims, **{job.id: self._claim(job, now) for job in candidates[:number]}}
            tried = fair_shares(with_them, total)
            if any(tried[job.id] < 1 for job in candidates[:number]):
                return None
            if any(tried[id_] < shares[id_] for id_, claim in claims.items() if claim.weight > weight):
                return None
            return number, with_them, tried

        best, step = (0, dict(claims), shares), 1
        refused = len(candidates) + 1
        while (number := min(best[0] + step, len(candidates), refused - 1)) > best[0]:
            if (found := sharing(number)) is not None:
                best, step = found, 2 * step
            else:
                refused, step = number, max(1, (number - best[0]) // 2)
        return best

    def borrow(self, view: VcView, now: float) -> PolicyActions:
        yield from Policy.borrow(self, view, now)
        yield from grow_borrowed(view)

    def _claim(self, job: JobView, now: float) -> Claim:
        request = job.request
        if not request.elastic:
            return Claim(self.weight(job, now), request.devices, request.devices)
        return Claim(self.weight(job, now), max(request.smallest, 1), limit(job))


def fair_shares(claims: Mapping[JobId, Claim], total: int) -> dict[JobId, int]:
    """Whole devices in proportion to weights, within the limits of every claim; higher weights first where not all fit."""
    shares = dict.fromkeys(claims, 0)
    left = total
    sharing: list[tuple[JobId, Claim]] = []
    for id_, claim in sorted(claims.items(), key=lambda item: -item[1].weight):
        if claim.least <= left:
            shares[id_] = claim.least
            left -= claim.least
            sharing.append((id_, claim))
    shares.update(_water_fill(sharing, left + sum(claim.least for _, claim in sharing)))
    return shares


def _water_fill(sharing: Sequence[tuple[JobId, Claim]], total: int) -> dict[JobId, int]:
    """Water filling in whole devices: as if each went to the claim with the smallest share per weight."""

    def at(level: float) -> list[int]:
        return [min(claim.most, max(claim.least, int(level * claim.weight))) for _, claim in sharing]

    low, high = 0.0, max((claim.most / claim.weight for _, claim in sharing), default=0.0)
    if sum(at(high)) > total:
        while high - low > 1e-6 * high and sum(at(low)) < total:
            middle = (low + high) / 2
            low, high = (middle, high) if sum(at(middle)) <= total else (low, middle)
    else:
        low = high
    given = at(low)
    left = total - sum(given)
    least_served = [
        ((given[k] + 1) / claim.weight, k) for k, (_, claim) in enumerate(sharing) if given[k] < claim.most
    ]
    heapq.heapify(least_served)
    while left > 0 and least_served:
        _, k = heapq.heappop(least_served)
        given[k] += 1
        left -= 1
        if given[k] < sharing[k][1].most:
            heapq.heappush(least_served, ((given[k] + 1) / sharing[k][1].weight, k))
    return {id_: given[k] for k, (id_, _) in enumerate(sharing)}


def by_type(
    view: VcView, jobs: Sequence[JobView], shares: Mapping[JobId, int]
) -> dict[JobId, dict[str, int]]:
    """Shares as devices by type: a job keeps its devices up to its share, and gets the rest of its best type with room."""
    free = dict(view.capacity)
    wanted: dict[JobId, dict[str, int]] = {}
    for job in jobs:
        kept: dict[str, int] = {}
        for type_, number in sorted(job.counts.items(), key=lambda item: -item[1]):
            keep = min(number, shares[job.id] - sum(kept.values()), free.get(type_, 0))
            if keep > 0:
                kept[type_] = keep
                free[type_] -= keep
        wanted[job.id] = kept
    for job in jobs:
        has = wanted[job.id]
        for type_ in _types(view, job, has):
            more = min(shares[job.id] - sum(has.values()), free.get(type_, 0))
            enough = job.request.mixes_types or sum(has.values()) + more >= job.request.smallest
            if more > 0 and enough:  # else the next type may have enough
                has[type_] = has.get(type_, 0) + more
                free[type_] -= more
                if not job.request.mixes_types:
                    break
        if sum(has.values()) < job.request.smallest:  # too few of one type are left for it
            for type_, number in has.items():
                free[type_] += number
            has.clear()
    return {id_: counts for id_, counts in wanted.items() if counts}


def _types(view: VcView, job: JobView, has: Mapping[str, int]) -> Sequence[str]:
    allowed = view.types_for(job.request)
    if has and not job.request.mixes_types:
        return tuple(has)
    return sorted(allowed, key=lambda type_: -view.rate(job, {type_: 1}))

"""Elastic-Tiresias: Tiresias with two rules on top (EDL §5.1). Inelastic jobs have what they asked for, or nothing.

- R1, compaction, before Tiresias decides, so that whom it can help preempts nobody. If more than `crowd` jobs wait, they are
  looked at in their order. Each is given the number of devices p, up to what it asked for, that raises the efficiency of
  devices most: its own, less what running jobs lose that give devices up. Running jobs of the first queue give nothing, and
  none is left with less than `least` of what it asked for; a job may be started on fewer. What running jobs give up for it
  comes from no more nodes than it would need for all that it asked for: one node, or those that can give most. A job with soft
  affinity has no such limit.
- R2, expansion, after it. If nobody waits, idle devices go one by one to the job that gains most by it, (S(p+1) - S(p)) / S(p);
  where one more does not help because virtual workers are whole, as many as do, by their gain per device.

When somebody waits again, jobs that were expanded first give back what they have beyond their request. When the crowd has gone
but some still wait, idle devices, which then are of no use to those, go to jobs that were compacted, up to their request.

The efficiency of p devices is their throughput per device relative to the best such; p devices at that efficiency are worth
S(p) / max_q S(q)/q devices (`worth`). A running job is resized at most every `hold` seconds for its own sake, and only
if what it gains in that time outweighs standing still for `price` seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from gyrostat.core.errors import UsageError
from gyrostat.core.request import Affinity, JobRequest
from gyrostat.sched.policies.proposals import grow_borrowed
from gyrostat.sched.policies.steady import check_price, limit
from gyrostat.sched.policies.tiresias import Tiresias
from gyrostat.sched.policy import PolicyAction, PolicyActions, RunOn, Wake
from gyrostat.sched.views import JobView, Key, VcView

_REFUSALS = 8  # so many jobs that cannot grow where they are end the search for one that can


@dataclass(frozen=True)
class _Donor:
    """A job that may be left with `least` devices; those that it gives up until then are on one node."""

    job: JobView
    node: int
    least: int


@dataclass(frozen=True)
class _Step:
    """So many devices more, and by what share they make a job faster, each."""

    more: int
    gain: float


_Growing = tuple[float, int, int, int]
"""-gain, the job's number, its devices, how many more; outdated ones are dropped when met."""


@dataclass
class _Index:
    """Running elastic jobs of a VC by what may be done with them. Only a shortcut: `rank` sees every change of a job."""

    jobs: dict[int, JobView] = field(default_factory=dict)
    expanded: dict[int, JobView] = field(default_factory=dict)
    donors: dict[int, _Donor] = field(default_factory=dict)
    """Those with more than their least."""
    compacted: list[_Growing] = field(default_factory=list)
    """A heap of those with less than they asked for that would be faster with more."""
    others: list[_Growing] = field(default_factory=list)
    """The same for those that could have more than they asked for."""


class ElasticTiresias(Tiresias):
    def __init__(
        self,
        *,
        queues: tuple[float, ...] = (500.0, 10_000.0),
        promote: float = 0.0,
        crowd: int = 10,
        least: float = 0.5,
        price: float = 0.0,
        hold: float = 0.0,
    ) -> None:
        super().__init__(queues=queues, promote=promote)
        if not 0 < least <= 1:
            raise UsageError(
                f"least is the share of its devices that a job keeps, above 0 and up to 1; got {least}"
            )
        check_price(price, hold)
        self.crowd = crowd
        self.least = least
        self.price = price
        self.hold = hold
        self._indices: WeakKeyDictionary[VcView, _Index] = WeakKeyDictionary()
        self._best: dict[object, float] = {}

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        self._note(job)
        return super().rank(job, now)

    def decide(self, view: VcView, now: float) -> PolicyActions:
        if len(view.waiting):
            yield from self._release_expanded(view)
        if len(view.waiting) > self.crowd:
            yield from self._compact(view)
        yield from super().decide(view, now)
        if len(view.waiting) <= self.crowd:
            yield from self._expand(view, now)

    def borrow(self, view: VcView, now: float) -> PolicyActions:
        yield from super().borrow(view, now)
        yield from grow_borrowed(view)

    def floor(self, request: JobRequest) -> int:
        """The fewest devices that a running job is left with when it gives some up."""
        return max(request.smallest, math.ceil(self.least * request.devices), 1)

    # What each job is.

    def _note(self, job: JobView) -> None:
        if not job.request.elastic:
            return
        index = self._indices.setdefault(job.vc, _Index())
        held = len(job.devices)
        if not held:
            for group in (index.jobs, index.expanded, index.donors):
                group.pop(job.number, None)
            return
        index.jobs[job.number] = job
        if held > job.request.devices:
            index.expanded[job.number] = job
        else:
            index.expanded.pop(job.number, None)
        if held > self.floor(job.request) and len(job.counts) == 1:
            index.donors[job.number] = self._donor(job)
        else:
            index.donors.pop(job.number, None)
        if len(job.counts) == 1 and (step := self._next_step(job)) is not None:
            heap = index.compacted if held < job.request.devices else index.others
            heapq.heappush(heap, (-step.gain, job.number, held, step.more))

    def _donor(self, job: JobView) -> _Donor:
        """Placers take from where a job has the fewest devices; that may be less than it could give in all."""
        per_node = Counter(job.vc.fleet.node_of[device] for device in job.devices)
        node = min(per_node, key=lambda position: (per_node[position], -position))
        return _Donor(job, node, max(self.floor(job.request), len(job.devices) - per_node[node]))

    def _next_step(self, job: JobView) -> _Step | None:
        """The fewest further devices that make it faster: whole virtual workers may need several."""
        ((type_, held),) = job.counts.items()
        before = job.vc.rate(job, {type_: held})
        for more in range(1, limit(job) - job.held + 1):
            after = job.vc.rate(job, {type_: held + more})
            if after > before * (1 + 1e-9) > 0:
                return _Step(more, (after / before - 1) / more)
        return None

    def worth(self, job: JobView, type_: str, devices: int) -> float:
        """S(p) / max_q S(q)/q: what p devices of the job count for when each counts for its efficiency."""
        if not devices:
            return 0.0
        request = job.request
        key = (request.workload, request.devices, request.virtual_workers, request.largest, type_)
        best = self._best.get(key) if job.companion is None else None
        if best is None:
            numbers = range(1, max(limit(job), request.devices) + 1)
            best = max(job.vc.rate(job, {type_: number}) / number for number in numbers)
            if job.companion is None:
                self._best[key] = best
        return job.vc.rate(job, {type_: devices}) / best if best else 0.0

    # R1.

    def _compact(self, view: VcView) -> PolicyActions:
        blocked: set[object] = set()
        donors = self._donors(view)
        while (donors or any(view.free_by_type().values())) and len(view.waiting) > self.crowd:
            job = view.waiting.best(blocked)
            if job is None:
                return
            for type_ in view.types_for(job.request):
                if (yield from self._start_compacted(view, job, type_, donors)):
                    donors = self._donors(view)
                    break
            else:
                blocked.add(job.request.kind)

    def _start_compacted(
        self, view: VcView, job: JobView, type_: str, donors: Mapping[int, Sequence[_Donor]]
    ) -> Generator[PolicyAction, bool, bool]:
        """Start a waiting job on what is free, or on that and what running jobs give up on one node."""
        floor, wanted = max(job.request.smallest, 1), job.request.devices
        for number in range(min(wanted, view.free(type_)), floor - 1, -1):
            if (
                yield RunOn(
                    job, {type_: number}, f"compaction: {number} of the {wanted} that it asked for are free"
                )
            ):
                return True
        plan = self._best_plan(job, type_, floor, _groups(job, type_, donors))
        if plan is None:
            return False
        number, giving = plan
        for donor, left in giving:
            yield RunOn(donor, {type_: left}, f"compaction: {job.id} makes better use of them")
        for devices in range(wanted, number - 1, -1):  # the node may have had free devices, too
            if (
                yield RunOn(job, {type_: devices}, f"compaction: {devices} of the {wanted} that it asked for")
            ):
                return True
        return False

    def _best_plan(
        self, job: JobView, type_: str, floor: int, groups: Iterable[Sequence[_Donor]]
    ) -> tuple[int, list[tuple[JobView, int]]] | None:
        """The number of devices, and the donors with what is left to them, that gain most; all donors of one group."""
        best: tuple[float, int, list[tuple[JobView, int]]] | None = None
        for donors in groups:
            loss, taken, left = 0.0, 0, {donor.job.number: len(donor.job.devices) for donor in donors}
            heap = [
                (self._loss(each.job, type_, len(each.job.devices)), each.job.number, each) for each in donors
            ]
            heapq.heapify(heap)
            while heap and taken < job.request.devices:
                cost, number, donor = heapq.heappop(heap)
                loss += cost
                taken += 1
                left[number] -= 1
                if left[number] > donor.least:
                    heapq.heappush(heap, (self._loss(donor.job, type_, left[number]), number, donor))
                gain = self.worth(job, type_, taken) - loss
                if taken >= floor and gain > 1e-9 and (best is None or gain > best[0]):
                    giving = [(each.job, left[each.job.number]) for each in donors]
                    best = (gain, taken, [(each, n) for each, n in giving if n < len(each.devices)])
        return None if best is None else best[1:]

    def _loss(self, donor: JobView, type_: str, devices: int) -> float:
        return self.worth(donor, type_, devices) - self.worth(donor, type_, devices - 1)

    def _donors(self, view: VcView) -> dict[int, list[_Donor]]:
        """Running jobs that may give devices up, by the node where they would; none of the first queue."""
        found: dict[int, list[_Donor]] = {}
        index = self._indices.get(view)
        for number in sorted(index.donors) if index is not None else ():
            assert index is not None
            donor = index.donors[number]
            job = donor.job
            if job.id not in view.jobs:
                del index.donors[number]
            elif job.entry is not None and job.entry[0][0] > 0 and job.guest is None and job.host is None:
                found.setdefault(donor.node, []).append(donor)
        return found

    # R2, and back.

    def _expand(self, view: VcView, now: float) -> PolicyActions:
        """Idle devices to whoever gains most; beyond what it asked for only if nobody waits."""
        index = self._indices.get(view)
        if index is not None:
            yield from self._grow(view, now, index, index.compacted)
            if not len(view.waiting):
                yield from self._grow(view, now, index, index.others)

    def _grow(self, view: VcView, now: float, index: _Index, gains: list[_Growing]) -> PolicyActions:
        refused: list[_Growing] = []
        wake_at = math.inf
        while gains and len(refused) < _REFUSALS and any(view.free_by_type().values()):
            entry = heapq.heappop(gains)
            number, held, more = entry[1:]
            job = index.jobs.get(number)
            if (
                job is None
                or job.id not in view.jobs
                or len(job.devices) != held
                or job.held + more > limit(job)
            ):
                continue
            ((type_, _),) = job.counts.items()
            gain = -entry[0] * more
            if gain * self.hold < (1 + gain) * self.price:
                continue
            if now < job.since + self.hold:
                wake_at = min(wake_at, job.since + self.hold)
                refused.append(entry)
            elif not (
                yield RunOn(
                    job, {type_: held + more}, f"expansion: {gain:.0%} faster on {more} idle ones more"
                )
            ):
                refused.append(entry)
        for entry in refused:
            heapq.heappush(gains, entry)
        if wake_at < math.inf:
            yield Wake(wake_at)

    def _release_expanded(self, view: VcView) -> PolicyActions:
        """Jobs with more than they asked for give it up one by one, until whoever waits fits into what is free."""
        index = self._indices.get(view)
        blocked: set[object] = set()
        while index is not None and index.expanded and (job := view.waiting.best(blocked)) is not None:
            if not (yield from self._start(view, job)):
                for donor in list(_alive(index.expanded, view)):
                    ((type_, _),) = donor.counts.items()
                    yield RunOn(
                        donor, {type_: donor.request.devices}, f"back to what it asked for: {job.id} waits"
                    )
                    if (yield from self._start(view, job)):
                        break
                else:
                    blocked.add(job.request.shape)

    def _start(self, view: VcView, job: JobView) -> Generator[PolicyAction, bool, bool]:
        """On devices that are free as it is."""
        for type_ in view.types_for(job.request):
            fits = view.free(type_) >= job.request.devices
            if fits and (yield RunOn(job, {type_: job.request.devices}, "fits into what is free")):
                return True
        return False


def _groups(job: JobView, type_: str, by_node: Mapping[int, Sequence[_Donor]]) -> Iterator[Sequence[_Donor]]:
    """Donors that may give together: those of a node, and where a job would need several, of as many that can give most."""
    nodes = [donors for donors in by_node.values() if type_ in donors[0].job.counts]
    yield from nodes
    limit = len(nodes)
    if job.request.affinity is Affinity.HARD and nodes:
        limit = -(-job.request.devices // job.vc.fleet.nodes[nodes[0][0].node].count)
    if limit > 1 and len(nodes) > 1:
        nodes.sort(key=lambda donors: -sum(len(each.job.devices) - each.least for each in donors))
        yield [donor for donors in nodes[:limit] for donor in donors]


def _alive(group: dict[int, JobView], view: VcView) -> Iterator[JobView]:
    """Those that have not finished, in the order of their submission; the others are dropped."""
    for number in sorted(group):
        if group[number].id in view.jobs:
            yield group[number]
        else:
            del group[number]

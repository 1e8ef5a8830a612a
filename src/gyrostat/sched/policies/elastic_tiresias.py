"""Elastic-Tiresias: Tiresias with two rules on top (EDL §5.1). Inelastic jobs have the devices that they request, or none.

- R1, compaction, before Tiresias decides, so that a job that compaction starts preempts none. If more than `crowd` jobs
  wait, each in order of rank gets the number of devices p, up to its request, that raises the efficiency of devices most:
  its own, less the loss of the running jobs (donors) whose devices it gets. Jobs of the first queue are no donors, and no
  donor keeps less than `least` of its request; a job may be started on fewer. The devices of donors come from at most as
  many nodes as the whole request would need: one node, or those with most to give. Jobs with soft affinity have no such
  limit.
- R2, expansion, after Tiresias. If no job waits, idle devices go one by one to the job with the largest relative gain,
  (S(p+1) - S(p)) / S(p); where one more does not help because virtual workers are not divisible, as many as do, by gain per
  device.

When a job waits again, expanded jobs first release their devices beyond their request. When at most `crowd` jobs wait, idle
devices, which none of them can use, go to compacted jobs, up to their request.

The efficiency of p devices is their throughput per device relative to the best p; p devices are worth S(p) / max_q S(q)/q
devices (`worth`). A running job is resized for its own sake at most every `hold` seconds, and only if its gain in that time
exceeds a pause of `price` seconds.
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

_REFUSALS = 8  # the search for a job that can grow ends after this many that cannot


@dataclass(frozen=True)
class _Donor:
    """A job that keeps at least `least` devices; those that it loses until then are on one node."""

    job: JobView
    node: int
    least: int


@dataclass(frozen=True)
class _Step:
    """A number of further devices, and the relative gain in throughput of each."""

    more: int
    gain: float


_Growing = tuple[float, int, int, int]
"""-gain, the job's number, its devices, further devices; outdated entries are dropped when popped."""


@dataclass
class _Index:
    """Running elastic jobs of a VC by role. A cache: `rank` is called for every change of a job and updates it."""

    jobs: dict[int, JobView] = field(default_factory=dict)
    expanded: dict[int, JobView] = field(default_factory=dict)
    donors: dict[int, _Donor] = field(default_factory=dict)
    """Jobs with more devices than they must keep."""
    compacted: list[_Growing] = field(default_factory=list)
    """A heap of jobs below their request that would be faster with more devices."""
    others: list[_Growing] = field(default_factory=list)
    """The same for jobs at or above their request."""


class ElasticTiresias(Tiresias):
    def __init__(
        self,
        *,
        queues: tuple[float, ...] = (500.0, 10_000.0),
        promote: float = 0.0,
        order: str = "running",
        crowd: int = 10,
        least: float = 0.5,
        price: float = 0.0,
        hold: float = 0.0,
    ) -> None:
        super().__init__(queues=queues, promote=promote, order=order)
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
        """The fewest devices that a running job keeps as a donor."""
        return max(request.smallest, math.ceil(self.least * request.devices), 1)

    # The index of jobs by role.

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
        """Placers shrink a job on the node where it has the fewest devices; that may be less than it could give in all."""
        per_node = Counter(job.vc.fleet.node_of[device] for device in job.devices)
        node = min(per_node, key=lambda position: (per_node[position], -position))
        return _Donor(job, node, max(self.floor(job.request), len(job.devices) - per_node[node]))

    def _next_step(self, job: JobView) -> _Step | None:
        """The fewest further devices that make it faster: virtual workers are not divisible, so it may take several."""
        ((type_, held),) = job.counts.items()
        before = job.vc.rate(job, {type_: held})
        for more in range(1, limit(job) - job.held + 1):
            after = job.vc.rate(job, {type_: held + more})
            if after > before * (1 + 1e-9) > 0:
                return _Step(more, (after / before - 1) / more)
        return None

    def worth(self, job: JobView, type_: str, devices: int) -> float:
        """S(p) / max_q S(q)/q: p devices of the job, weighted by their efficiency."""
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
        while donors or any(view.free_by_type().values()):
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
        """Start a waiting job on free devices, or on these and devices of donors."""
        floor, wanted = max(job.request.smallest, 1), job.request.devices
        for number in range(min(wanted, view.free(type_)), floor - 1, -1):
            if (
                yield RunOn(
                    job, {type_: number}, f"compaction: {number} of the {wanted} requested devices are free"
                )
            ):
                return True
        plan = self._best_plan(job, type_, floor, _groups(job, type_, donors))
        if plan is None:
            return False
        number, giving = plan
        for donor, left in giving:
            yield RunOn(donor, {type_: left}, f"compaction: {job.id} makes better use of them")
        for devices in range(wanted, number - 1, -1):  # the node may have free devices, too
            if (
                yield RunOn(job, {type_: devices}, f"compaction: {devices} of the {wanted} requested devices")
            ):
                return True
        return False

    def _best_plan(
        self, job: JobView, type_: str, floor: int, groups: Iterable[Sequence[_Donor]]
    ) -> tuple[int, list[tuple[JobView, int]]] | None:
        """The number of devices with the largest gain, and the donors of one group with the devices that each keeps."""
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
        """Running jobs that may lose devices, by the node of these devices; none of the first queue."""
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

    # R2 and its reversal.

    def _expand(self, view: VcView, now: float) -> PolicyActions:
        """Give idle devices to the jobs that gain most; beyond their request only if no job waits."""
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
                    job, {type_: held + more}, f"expansion: {gain:.0%} faster with {more} more idle devices"
                )
            ):
                refused.append(entry)
        for entry in refused:
            heapq.heappush(gains, entry)
        if wake_at < math.inf:
            yield Wake(wake_at)

    def _release_expanded(self, view: VcView) -> PolicyActions:
        """Shrink expanded jobs to their request one by one, until the waiting jobs fit into the free devices."""
        index = self._indices.get(view)
        blocked: set[object] = set()
        while index is not None and index.expanded and (job := view.waiting.best(blocked)) is not None:
            if not (yield from self._start(view, job)):
                for donor in list(_alive(index.expanded, view)):
                    ((type_, _),) = donor.counts.items()
                    yield RunOn(
                        donor, {type_: donor.request.devices}, f"shrunk to its request: {job.id} waits"
                    )
                    if (yield from self._start(view, job)):
                        break
                else:
                    blocked.add(job.request.shape)

    def _start(self, view: VcView, job: JobView) -> Generator[PolicyAction, bool, bool]:
        """Start the job if free devices suffice."""
        for type_ in view.types_for(job.request):
            fits = view.free(type_) >= job.request.devices
            if fits and (yield RunOn(job, {type_: job.request.devices}, "fits into free devices")):
                return True
        return False


def _groups(job: JobView, type_: str, by_node: Mapping[int, Sequence[_Donor]]) -> Iterator[Sequence[_Donor]]:
    """Donors that may be combined: those of one node; and for a job of several nodes, those of the nodes with most to give."""
    nodes = [donors for donors in by_node.values() if type_ in donors[0].job.counts]
    yield from nodes
    limit = len(nodes)
    if job.request.affinity is Affinity.HARD and nodes:
        limit = -(-job.request.devices // job.vc.fleet.nodes[nodes[0][0].node].count)
    if limit > 1 and len(nodes) > 1:
        nodes.sort(key=lambda donors: -sum(len(each.job.devices) - each.least for each in donors))
        yield [donor for donors in nodes[:limit] for donor in donors]


def _alive(group: dict[int, JobView], view: VcView) -> Iterator[JobView]:
    """Jobs that have not finished, in order of submission; the others are dropped."""
    for number in sorted(group):
        if group[number].id in view.jobs:
            yield group[number]
        else:
            del group[number]

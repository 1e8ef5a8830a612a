"""The views that policies read: jobs, and their virtual cluster (VC). Only `sched.state` writes them.

A job of a VC is in exactly one of three queues, each in the order of the policy's `rank`: `waiting` (it has no devices),
`borrowing` (it runs on borrowed devices only) and `holding` (it has guaranteed devices, and perhaps borrowed ones).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from gyrostat.core.devices import Counts, Devices, Fleet
from gyrostat.core.request import JobId, JobRequest, Shape
from gyrostat.sched.planner.companion import Companion, CountsKey

Key = tuple[float, ...]
"""The order of jobs in a queue: the smallest is first."""


class JobView:
    """One job that has been submitted and has not finished."""

    __slots__ = (
        "_done",
        "_done_at",
        "_executed",
        "_own_service",
        "_rate",
        "_seconds_at_reset",
        "_seconds_on",
        "_service",
        "_service_at_reset",
        "before",
        "borrowed",
        "borrowed_counts",
        "changed",
        "companion",
        "counts",
        "devices",
        "entry",
        "guest",
        "host",
        "id",
        "measured",
        "number",
        "queue",
        "request",
        "since",
        "started",
        "starts",
        "vc",
        "waiting_since",
    )  # fmt: skip

    def __init__(self, request: JobRequest, number: int, vc: VcView, now: float) -> None:
        self.request = request
        self.id: JobId = request.id
        self.vc = vc
        self.number = number
        """Rises with every submission; breaks ties."""
        self.devices: Devices = ()
        """Its guaranteed devices."""
        self.borrowed: Devices = ()
        """Its borrowed devices, which may be reclaimed."""
        self.counts: Counts = {}
        """`devices` by type."""
        self.borrowed_counts: Counts = {}
        self.before: Counts = {}
        """All its devices before they last changed, by type."""
        self.measured: dict[CountsKey, float] = {}
        """Units of work per second that the cluster reported, by devices."""
        self.companion: Companion | None = None
        """Estimates its throughput once measurements or history differ from its profile (see `sched.estimates`)."""
        self.host: JobView | None = None
        """The job whose devices it shares."""
        self.guest: JobView | None = None
        """The job that shares its devices."""
        self.changed = 0
        """The number of its last change of queue or rank, counted over all jobs: orders what happens at one instant."""
        self.queue: Queue | None = None
        self.entry: tuple[Key, int, JobView] | None = None
        self.started: float | None = None
        """When it first got guaranteed devices."""
        self.since = now
        """When its devices last changed."""
        self.waiting_since = now
        """When it last began to wait."""
        self.starts = 0
        self._service = 0.0
        self._own_service = 0.0
        self._executed = 0.0
        self._service_at_reset = 0.0
        self._seconds_on: dict[str, float] = {}
        self._seconds_at_reset: dict[str, float] = {}
        self._done = 0.0
        self._rate = 0.0
        self._done_at = now

    @property
    def held(self) -> int:
        """Number of devices, guaranteed and borrowed."""
        return len(self.devices) + len(self.borrowed)

    @property
    def running(self) -> bool:
        return bool(self.devices or self.borrowed)

    def all_counts(self) -> dict[str, int]:
        """All its devices, by type."""
        counts = dict(self.counts)
        for type_, number in self.borrowed_counts.items():
            counts[type_] = counts.get(type_, 0) + number
        return counts

    def service(self, now: float) -> float:
        """Attained service so far, in device-seconds."""
        return self._service + self.held * (now - self.since)

    def own_service(self, now: float) -> float:
        """Attained service on guaranteed devices. Borrowed devices cost the other jobs of the VC nothing."""
        return self._own_service + len(self.devices) * (now - self.since)

    def recent_service(self, now: float) -> float:
        """Attained service on guaranteed devices since the last `ResetService`."""
        return self.own_service(now) - self._service_at_reset

    def reset_service(self, now: float) -> None:
        """(Scheduler state only) count `recent_service` and `recent_seconds_on` from 0 again."""
        self._service_at_reset = self.own_service(now)
        self._seconds_at_reset = {type_: self.seconds_on(type_, now) for type_ in self.vc.fleet.totals}

    def executed(self, now: float) -> float:
        """Seconds with devices so far."""
        return self._executed + (now - self.since if self.running else 0.0)

    def seconds_on(self, type_: str, now: float) -> float:
        """Seconds with devices of this type so far."""
        has = type_ in self.counts or type_ in self.borrowed_counts
        return self._seconds_on.get(type_, 0.0) + (now - self.since if has else 0.0)

    def recent_seconds_on(self, type_: str, now: float) -> float:
        """Seconds with devices of this type since the last `ResetService`."""
        return self.seconds_on(type_, now) - self._seconds_at_reset.get(type_, 0.0)

    def done(self, now: float) -> float:
        """Units of work done: the last report, extrapolated at its rate."""
        return self._done + self._rate * (now - self._done_at)

    def remaining(self, now: float) -> float | None:
        """Units of work left; None if the request does not say how much work there is."""
        return None if self.request.work is None else max(0.0, self.request.work - self.done(now))

    def precedes(self, other: JobView) -> bool:
        """Whether its rank is before the other's."""
        return _entry(self) < _entry(other)

    def settle(self, now: float) -> None:
        """(Scheduler state only) account for the time since its devices last changed; they are about to change."""
        self._service = self.service(now)
        self._own_service = self.own_service(now)
        self._executed = self.executed(now)
        for type_ in self.all_counts() if self.borrowed else self.counts:
            self._seconds_on[type_] = self._seconds_on.get(type_, 0.0) + now - self.since
        self.since = now

    def report(self, now: float, done: float, rate: float) -> None:
        """(Scheduler state only) the progress that the cluster reported."""
        self._done, self._rate, self._done_at = done, rate, now

    def __repr__(self) -> str:
        return f"JobView({self.id}, {self.request.devices} requested, {len(self.devices)}+{len(self.borrowed)} held)"


class Queue:
    """Jobs by rank, in buckets by kind: of the jobs of one kind only the first needs to be considered."""

    def __init__(self, *, by_kind: bool = True) -> None:
        self._by_kind = by_kind
        self._buckets: dict[Shape | None, list[tuple[Key, int, JobView]]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[JobView]:
        """All jobs by rank; of a copy, so that the queue may change meanwhile."""
        if len(self._buckets) == 1:
            entries = next(iter(self._buckets.values()))
        else:
            entries = sorted(entry for bucket in self._buckets.values() for entry in bucket)
        return iter([job for _, _, job in entries])

    def best(self, without: Collection[object] = ()) -> JobView | None:
        """The first job by rank, except those of these shapes or kinds."""
        found: tuple[Key, int, JobView] | None = None
        for kind, bucket in self._buckets.items():
            first = bucket[0]
            if (
                (found is None or first < found)
                and kind not in without
                and first[2].request.shape not in without
            ):
                found = first
        return None if found is None else found[2]

    def heads(self) -> list[tuple[Key, int, JobView]]:
        """The first job of each kind."""
        return [bucket[0] for bucket in self._buckets.values()]

    def worst(self) -> JobView | None:
        """The last job by rank."""
        found = max((bucket[-1] for bucket in self._buckets.values()), default=None)
        return None if found is None else found[2]

    def lowest_behind(self, job: JobView) -> Iterator[JobView]:
        """Jobs that rank behind `job` (which may be in another queue), the last first. Only for a queue without kinds."""
        assert job.entry is not None
        assert not self._by_kind
        for bucket in self._buckets.values():
            for place in range(len(bucket) - 1, bisect_left(bucket, job.entry) - 1, -1):
                yield bucket[place][2]

    def devices_behind(self, job: JobView) -> int:
        """Upper bound of the guaranteed devices of these jobs: shared devices count twice."""
        assert job.entry is not None
        return sum(
            len(entry[2].devices)
            for bucket in self._buckets.values()
            for entry in bucket[bisect_left(bucket, job.entry) :]
        )

    def add(self, job: JobView, key: Key) -> None:
        """(Scheduler state only.)"""
        entry = (key, job.number, job)
        job.queue, job.entry = self, entry
        kind = job.request.kind if self._by_kind else None
        bucket = self._buckets.get(kind)
        if bucket is None:
            self._buckets[kind] = [entry]
        elif entry > bucket[-1]:
            bucket.append(entry)
        else:
            insort(bucket, entry)
        self._length += 1

    def remove(self, job: JobView) -> None:
        """(Scheduler state only.)"""
        assert job.entry is not None
        assert job.queue is self
        kind = job.request.kind if self._by_kind else None
        bucket = self._buckets[kind]
        if len(bucket) == 1:
            del self._buckets[kind]
        else:
            del bucket[bisect_left(bucket, job.entry)]
        job.queue = None
        self._length -= 1


def best_of(*queues: Queue, without: Collection[object] = ()) -> JobView | None:
    """The first job by rank of several queues."""
    found: JobView | None = None
    for queue in queues:
        job = queue.best(without)
        if job is not None and (found is None or _entry(job) < _entry(found)):
            found = job
    return found


def _entry(job: JobView) -> tuple[Key, int, JobView]:
    assert job.entry is not None
    return job.entry


class Histogram:
    """Counts of values, in logarithmic bins: eight per doubling."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._counts: dict[int, tuple[int, float]] = {}
        self.total = 0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        step = math.floor(8 * math.log2(value)) if value > 0 else -1_000
        number, whole = self._counts.get(step, (0, 0.0))
        self._counts[step] = (number + 1, whole + value)
        self.total += 1

    def steps(self) -> list[tuple[float, int]]:
        """The mean and the count of each bin that is not empty, ascending."""
        return [(whole / number, number) for _, (number, whole) in sorted(self._counts.items())]


@dataclass(frozen=True)
class SchedulingRound:
    """When a policy that decides in rounds began the present one, and for which jobs it last computed their shares."""

    began: float = -math.inf
    computed: float = -math.inf
    """When the shares were computed."""
    jobs: frozenset[JobId] = frozenset()
    """The jobs that have shares."""


class VcView:
    """One virtual cluster: its guaranteed devices, their use, and its jobs."""

    def __init__(
        self, name: str, *, weight: float, rate: Callable[[JobRequest, Counts], float], fleet: Fleet
    ) -> None:
        self.name = name
        self.weight = weight
        self.fleet = fleet
        """Maps a device to its node and type."""
        self.round = SchedulingRound()
        """The round of a policy that decides in rounds."""
        self.capacity: Counts = {}
        """Guaranteed devices that are available, by type."""
        self.used: dict[str, int] = {}
        """Guaranteed devices that its jobs hold, by type."""
        self.borrowed: dict[str, int] = {}
        """Borrowed devices that its jobs hold, by type."""
        self.lendable: Counts = {}
        """Idle devices of the whole cluster, by type; empty where nothing is lent."""
        self.jobs: dict[JobId, JobView] = {}
        """All its jobs, in the order of submission."""
        self.history = Histogram()
        """Attained service of finished jobs, in device-seconds."""
        self.waiting = Queue()
        self.borrowing = Queue()
        self.holding = Queue(by_kind=False)
        self._rate = rate
        self._inadmissible: dict[object, tuple[Key, int, JobView]] = {}

    def is_inadmissible(self, job: JobView) -> bool:
        """Whether no preemption helps the job: none helped it, or a better-ranked one of its shape, and nothing has changed
        since that could help.
        """
        known = self._inadmissible.get(job.request.shape)
        return known is not None and known <= _entry(job)

    def note_inadmissible(self, job: JobView) -> None:
        """(Scheduler state only.)"""
        self._inadmissible[job.request.shape] = _entry(job)

    def reconsider_behind(self, job: JobView | None) -> None:
        """(Scheduler state only) a job that holds devices loses its rank; jobs behind it may be admissible now. None: all."""
        for shape, entry in list(self._inadmissible.items()):
            if job is None or _entry(job) < entry:
                del self._inadmissible[shape]

    def free(self, type_: str) -> int:
        """Guaranteed devices of a type that its jobs do not hold."""
        return self.capacity.get(type_, 0) - self.used.get(type_, 0)

    def free_by_type(self) -> dict[str, int]:
        """Free guaranteed devices of all types."""
        return {type_: self.free(type_) for type_ in self.capacity}

    def next(self, without: Collection[object] = ()) -> JobView | None:
        """The first job by rank without guaranteed devices, waiting or borrowing, except those of these shapes."""
        return best_of(self.waiting, self.borrowing, without=without)

    def heads(self, without: Collection[object] = ()) -> list[JobView]:
        """The first job of each kind without guaranteed devices, by rank."""
        entries = [*self.waiting.heads(), *self.borrowing.heads()]
        entries.sort()
        return [job for _, _, job in entries if job.request.shape not in without]

    def outranks_a_holder(self, job: JobView) -> bool:
        """Whether a job that holds devices ranks behind this one."""
        worst = self.holding.worst()
        return worst is not None and not worst.precedes(job)

    def types_for(self, request: JobRequest) -> tuple[str, ...]:
        """Device types that the job may use in this VC, best first."""
        return request.types or tuple(self.capacity) or tuple(self.lendable)

    def rate(self, job: JobView, counts: Counts) -> float:
        """Expected units of work per second on these devices."""
        companion = job.companion
        if companion is None:
            return self._rate(job.request, counts)
        return companion.throughput(counts) / companion.virtual_workers

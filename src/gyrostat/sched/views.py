"""What policies see: jobs, and the virtual cluster (VC) that they share. Read-only for them; `sched.books` keeps it
current.

A job of a VC is in exactly one of three queues, each in the order of the policy's `rank`: `waiting` (it holds
nothing), `borrowing` (it runs, but only on devices that belong to others) and `holding` (it holds devices of the VC's
guarantee, and perhaps borrowed ones besides).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator

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
        "_seconds_on",
        "_service",
        "_service_at_reset",
        "before",
        "borrowed",
        "borrowed_counts",
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
        """Of its submission: breaks ties."""
        self.devices: Devices = ()
        """Those it holds of its VC's guarantee."""
        self.borrowed: Devices = ()
        """Those it holds besides, which may be taken back."""
        self.counts: Counts = {}
        """`devices` by type."""
        self.borrowed_counts: Counts = {}
        self.before: Counts = {}
        """All that it had before its devices last changed, by type."""
        self.measured: dict[CountsKey, float] = {}
        """Units of work per second that its cluster reported, by devices."""
        self.companion: Companion | None = None
        """What is expected of it where that is known better than by its profile (see `sched.estimates`)."""
        self.host: JobView | None = None
        """The job whose devices it uses together with it."""
        self.guest: JobView | None = None
        """The job that uses its devices together with it."""
        self.queue: Queue | None = None
        self.entry: tuple[Key, int, JobView] | None = None
        self.started: float | None = None
        """When it first got devices of its VC's guarantee."""
        self.since = now
        """When it last got other devices, or lost them."""
        self.waiting_since = now
        """When it last began to wait."""
        self.starts = 0
        self._service = 0.0
        self._own_service = 0.0
        self._executed = 0.0
        self._service_at_reset = 0.0
        self._seconds_on: dict[str, float] = {}
        self._done = 0.0
        self._rate = 0.0
        self._done_at = now

    @property
    def held(self) -> int:
        """How many devices it has now."""
        return len(self.devices) + len(self.borrowed)

    @property
    def running(self) -> bool:
        return bool(self.devices or self.borrowed)

    def all_counts(self) -> dict[str, int]:
        """All that it has now, by type."""
        counts = dict(self.counts)
        for type_, number in self.borrowed_counts.items():
            counts[type_] = counts.get(type_, 0) + number
        return counts

    def service(self, now: float) -> float:
        """Device-seconds that it has had so far."""
        return self._service + self.held * (now - self.since)

    def own_service(self, now: float) -> float:
        """Of these: on devices of its VC's guarantee. What it borrowed besides is no concern of the VC's other jobs."""
        return self._own_service + len(self.devices) * (now - self.since)

    def recent_service(self, now: float) -> float:
        """Of its own service: since a policy last had it forgiven."""
        return self.own_service(now) - self._service_at_reset

    def reset_service(self, now: float) -> None:
        """(For the books) count its recent service from now on."""
        self._service_at_reset = self.own_service(now)

    def executed(self, now: float) -> float:
        """Seconds for which it has had devices so far."""
        return self._executed + (now - self.since if self.running else 0.0)

    def seconds_on(self, type_: str, now: float) -> float:
        """Seconds for which it has had devices of this type so far."""
        has = type_ in self.counts or type_ in self.borrowed_counts
        return self._seconds_on.get(type_, 0.0) + (now - self.since if has else 0.0)

    def done(self, now: float) -> float:
        """Units of work, as last reported and carried on at the last reported rate."""
        return self._done + self._rate * (now - self._done_at)

    def remaining(self, now: float) -> float | None:
        """Units of work, if its owner said how much there is."""
        return None if self.request.work is None else max(0.0, self.request.work - self.done(now))

    def precedes(self, other: JobView) -> bool:
        """By rank."""
        return _entry(self) < _entry(other)

    def settle(self, now: float) -> None:
        """(For the books) account for the time since its devices last changed; they are about to."""
        self._service = self.service(now)
        self._own_service = self.own_service(now)
        self._executed = self.executed(now)
        for type_ in self.all_counts() if self.borrowed else self.counts:
            self._seconds_on[type_] = self._seconds_on.get(type_, 0.0) + now - self.since
        self.since = now

    def report(self, now: float, done: float, rate: float) -> None:
        """(For the books) what its cluster says about its progress."""
        self._done, self._rate, self._done_at = done, rate, now

    def __repr__(self) -> str:
        return f"JobView({self.id}, {self.request.devices} wanted, {len(self.devices)}+{len(self.borrowed)} held)"


class Queue:
    """Jobs by rank, and by kind: of jobs that are alike only the first needs to be looked at."""

    def __init__(self, *, by_kind: bool = True) -> None:
        self._by_kind = by_kind
        self._buckets: dict[Shape | None, list[tuple[Key, int, JobView]]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[JobView]:
        """All of them, by rank; a copy, so that they may change meanwhile."""
        if len(self._buckets) == 1:
            entries = next(iter(self._buckets.values()))
        else:
            entries = sorted(entry for bucket in self._buckets.values() for entry in bucket)
        return iter([job for _, _, job in entries])

    def best(self, without: Collection[object] = ()) -> JobView | None:
        """The first, not looking at jobs of these shapes or kinds."""
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
        """The first of each kind."""
        return [bucket[0] for bucket in self._buckets.values()]

    def worst(self) -> JobView | None:
        """The last."""
        found = max((bucket[-1] for bucket in self._buckets.values()), default=None)
        return None if found is None else found[2]

    def lowest_behind(self, job: JobView) -> Iterator[JobView]:
        """Those that come after `job` (which may be in another queue), the last first. Only where shapes do not
        matter.
        """
        assert job.entry is not None
        assert not self._by_kind
        for bucket in self._buckets.values():
            for place in range(len(bucket) - 1, bisect_left(bucket, job.entry) - 1, -1):
                yield bucket[place][2]

    def devices_behind(self, job: JobView) -> int:
        """Devices of the guarantee that these hold, at most (those that share devices are counted, too)."""
        assert job.entry is not None
        return sum(
            len(entry[2].devices)
            for bucket in self._buckets.values()
            for entry in bucket[bisect_left(bucket, job.entry) :]
        )

    def add(self, job: JobView, key: Key) -> None:
        """(For the books.)"""
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
        """(For the books.)"""
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


def first(*queues: Queue, without: Collection[object] = ()) -> JobView | None:
    """The best of several queues."""
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
    """How often values of which size occurred, in steps of an eighth of a doubling."""

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
        """The mean value of each step that occurred, and how often; ascending."""
        return [(whole / number, number) for _, (number, whole) in sorted(self._counts.items())]


class VcView:
    """One virtual cluster: what it is guaranteed, what it uses, and its jobs."""

    def __init__(
        self, name: str, *, weight: float, rate: Callable[[JobRequest, Counts], float], fleet: Fleet
    ) -> None:
        self.name = name
        self.weight = weight
        self.fleet = fleet
        """Which node and type a device belongs to."""
        self.now = 0.0
        self.capacity: Counts = {}
        """The devices that it is guaranteed and that are there, by type."""
        self.used: dict[str, int] = {}
        """Of these: how many its jobs hold."""
        self.borrowed: dict[str, int] = {}
        """How many its jobs hold besides."""
        self.lendable: Counts = {}
        """Devices of the whole cluster that nobody uses now, by type; empty where nothing is lent."""
        self.jobs: dict[JobId, JobView] = {}
        """All of them, in the order in which they were submitted."""
        self.history = Histogram()
        """Device-seconds that finished jobs took in all."""
        self.waiting = Queue()
        self.borrowing = Queue()
        self.holding = Queue(by_kind=False)
        self._rate = rate
        self._inadmissible: dict[object, tuple[Key, int, JobView]] = {}

    def is_inadmissible(self, job: JobView) -> bool:
        """Whether stopping jobs of lower rank was of no help to this one or a better one of its shape, and cannot be
        now.
        """
        known = self._inadmissible.get(job.request.shape)
        return known is not None and known <= _entry(job)

    def note_inadmissible(self, job: JobView) -> None:
        """(For the books.)"""
        self._inadmissible[job.request.shape] = _entry(job)

    def reconsider_behind(self, job: JobView | None) -> None:
        """(For the books) a job that holds devices leaves its place; it may help those that rank behind it. None: all."""
        for shape, entry in list(self._inadmissible.items()):
            if job is None or _entry(job) < entry:
                del self._inadmissible[shape]

    def free(self, type_: str) -> int:
        """Devices of its guarantee that its jobs do not hold."""
        return self.capacity.get(type_, 0) - self.used.get(type_, 0)

    def free_by_type(self) -> dict[str, int]:
        """All that is free, by type."""
        return {type_: self.free(type_) for type_ in self.capacity}

    def next(self, without: Collection[object] = ()) -> JobView | None:
        """The first job that holds none of the guarantee, waiting or borrowing, not looking at these shapes."""
        return first(self.waiting, self.borrowing, without=without)

    def heads(self, without: Collection[object] = ()) -> list[JobView]:
        """Those that `next` would return one after another, were each of them skipped with its kind."""
        entries = [*self.waiting.heads(), *self.borrowing.heads()]
        entries.sort()
        return [job for _, _, job in entries if job.request.shape not in without]

    def outranks_a_holder(self, job: JobView) -> bool:
        """Whether a job that holds devices ranks behind this one."""
        worst = self.holding.worst()
        return worst is not None and not worst.precedes(job)

    def types_for(self, request: JobRequest) -> tuple[str, ...]:
        """Device types that the job may use here, best first."""
        return request.types or tuple(self.capacity) or tuple(self.lendable)

    def rate(self, job: JobView, counts: Counts) -> float:
        """Expected units of work per second on so many devices."""
        companion = job.companion
        if companion is None:
            return self._rate(job.request, counts)
        return companion.throughput(counts) / companion.virtual_workers

"""From device targets to actions, without oscillation: the common part of elastic policies.

An elastic policy computes the devices that each job should have (`DeviceTargets`); this module finds the actions:

1. A running job is resized for its own sake only if that pays: its gain until the next possible resize must exceed the cost
   (`price`: seconds of pause), and its last resize must be at least `hold` seconds ago.
2. A running job is shrunk only if another job needs the devices, for a start or for a resize that pays; or if they are of no
   use to it (`DeviceTargets.released`).
3. Shrinks precede the actions that take the devices.

A resize that `hold` delays is considered again when `hold` is over (`Wake`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from gyrostat.core.devices import Counts
from gyrostat.core.errors import UsageError
from gyrostat.core.request import JobId
from gyrostat.sched.policy import Policy, PolicyActions, RunOn, StopJob, Wake
from gyrostat.sched.views import JobView, VcView


@dataclass
class DeviceTargets:
    """Guaranteed devices by job, in order of importance, with reasons. Jobs that are not listed get none."""

    devices: dict[JobId, dict[str, int]] = field(default_factory=dict)
    reasons: dict[JobId, str] = field(default_factory=dict)
    released: set[JobId] = field(default_factory=set)
    """Jobs that release devices whether or not another job needs them."""


class SteadyPolicy(Policy):
    """A policy that computes device targets."""

    def __init__(self, *, price: float, hold: float) -> None:
        check_price(price, hold)
        self.price = price
        self.hold = hold

    @abstractmethod
    def assign(self, view: VcView, now: float) -> DeviceTargets:
        """The guaranteed devices that each job of the VC should have."""

    def decide(self, view: VcView, now: float) -> PolicyActions:
        yield from self.reconcile(view, self.assign(view, now), now)

    def reconcile(self, view: VcView, wanted: DeviceTargets, now: float) -> PolicyActions:
        """The actions towards these targets, by the rules of the module's docstring."""
        takes, gives, wake_at = self._takes_and_gives(view, wanted.devices, now)
        need = {type_: -view.free(type_) for type_ in view.capacity}
        for job, counts in takes:
            for type_, number in counts.items():
                need[type_] = need.get(type_, 0) + number - job.counts.get(type_, 0)
        for job, counts in gives:
            given = {
                type_: n - counts.get(type_, 0) for type_, n in job.counts.items() if n > counts.get(type_, 0)
            }
            if job.id in wanted.released or any(need.get(type_, 0) > 0 for type_ in given):
                reason = wanted.reasons.get(job.id, "makes room for others")
                enough = sum(counts.values()) + len(job.borrowed) >= max(job.request.smallest, 1)
                yield RunOn(job, counts, reason) if enough else StopJob(job, reason)
                for type_, number in given.items():
                    need[type_] = need.get(type_, 0) - number
        for job, counts in takes:
            if job.borrowed and not fits_besides(job, counts):
                yield RunOn(job, {}, "gets guaranteed devices", borrowed=True)
            yield RunOn(job, counts, wanted.reasons.get(job.id, "new share"))
        if wake_at is not None:
            yield Wake(wake_at)

    def _takes_and_gives(
        self, view: VcView, wanted: Mapping[JobId, Counts], now: float
    ) -> tuple[list[tuple[JobView, Counts]], list[tuple[JobView, Counts]], float | None]:
        """Jobs that should grow now, jobs that could shrink (the least important first), and when to decide again."""
        takes: list[tuple[JobView, Counts]] = []
        gives: list[tuple[JobView, Counts]] = [(job, {}) for job in view.holding if job.id not in wanted]
        wake_at: float | None = None
        shrinks = []
        for id_, counts in wanted.items():
            job = view.jobs[id_]
            counts = {type_: number for type_, number in counts.items() if number}
            if counts == job.counts:
                continue
            if not job.counts:
                takes.append((job, counts))
            elif all(number <= job.counts.get(type_, 0) for type_, number in counts.items()):
                shrinks.append((job, counts))
            elif now < job.since + self.hold:
                wake_at = min(wake_at or job.since + self.hold, job.since + self.hold)
            elif self.pays(view.rate(job, job.all_counts()), view.rate(job, counts)):
                takes.append((job, counts))
        return takes, gives + shrinks[::-1], wake_at

    def pays(self, before: float, after: float) -> bool:
        """Whether a resize from one rate to the other pays for a running job."""
        return after > before and (after - before) * self.hold >= after * self.price


def check_price(price: float, hold: float) -> None:
    """Raise if these settings are invalid."""
    if price < 0 or hold < 0:
        raise UsageError(f"price and hold are seconds, 0 or more; got {price} and {hold}")
    if hold <= price and price > 0:
        raise UsageError(
            f"a resize that costs {price} s can only pay if the job may keep it for longer: raise hold, now {hold}"
        )


def fits_besides(job: JobView, counts: Counts) -> bool:
    """Whether the job may hold `counts` together with its borrowed devices."""
    both = sum(counts.values()) + len(job.borrowed)
    return both <= limit(job) and (job.request.mixes_types or set(job.borrowed_counts) <= set(counts))


def limit(job: JobView) -> int:
    """The most devices that the job can use."""
    return min(job.request.largest, job.request.virtual_workers or job.request.largest)

"""Tiresias (Gu et al., NSDI 2019; EDL §5.1): least attained service first, without knowing how long jobs will take.

A job's attained service is two-dimensional: devices times seconds. It is discretised into queues: a job starts in the first
queue and is demoted to the next when its service reaches a threshold. Devices go to jobs of the first queue, then the
second, and so on; running jobs of lower queues are preempted for them. Within a queue:

- `tiresias` (discretised 2D-LAS): running jobs first, so jobs of one queue do not preempt each other. They are ordered by
  their start, or by their demotion into the queue if that was later. Of the waiting ones, those that were preempted in this
  queue come first, the last preempted first of all; then the others in the order in which they came.
- `gittins` (discretised 2D-Gittins): by Gittins index, from the service of the jobs that have finished so far (or a given
  list): the probability to finish within the queue's quantum per expected service until then. The last queue, and equal
  indices, are ordered as above.

That is `order=running`, the default. There are two others, to compare with:

- `simulator`: the order of Tiresias' public simulator. There, a running job that is demoted goes behind the waiting jobs of its
  new queue, which then preempt it. On an eighth of the Philly trace at a load of 1.04 that raises mean JCT by 27 % and the
  number of preemptions by 35 %.
- `start`: by first start, as the paper's text can be read. An older job of the queue that was preempted takes its devices back
  from a running one: mean JCT is 6.0 times, preemptions are 4.2 times as many.

A job that has waited for `promote` times as long as it has run is promoted to the first queue (0: never).

Service on borrowed devices does not count for queues: it would demote a job in its own VC for devices of other VCs, and the
order of jobs would differ from that in a private cluster.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from gyrostat.core.errors import UsageError
from gyrostat.sched.policies.preemptive import by_rank
from gyrostat.sched.policy import Policy, PolicyActions
from gyrostat.sched.views import Histogram, JobView, Key, VcView

ORDERS = ("running", "simulator", "start")
_ROUNDING = 1e-9  # a job that is about to reach a threshold has reached it


class Tiresias(Policy):
    def __init__(
        self, *, queues: tuple[float, ...] = (500.0, 10_000.0), promote: float = 0.0, order: str = "running"
    ) -> None:
        if list(queues) != sorted(set(queues)) or (queues and queues[0] <= 0):
            raise UsageError(
                f"thresholds of queues must be positive and rise, got {'/'.join(map(str, queues))}"
            )
        if promote < 0:
            raise UsageError(f"promote must be 0 (never) or more, got {promote}")
        self.queues = queues
        if order not in ORDERS:
            raise UsageError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        self.promote = promote
        self.order = order

    def rank(self, job: JobView, now: float) -> tuple[Key, float]:
        if self.starving(job, now):
            return (0.0, -math.inf, job.changed), math.inf
        service = job.recent_service(now)
        queue = bisect_right(self.queues, service * (1 + _ROUNDING))
        until = math.inf
        if job.devices and queue < len(self.queues):
            until = now + (self.queues[queue] - service) / len(job.devices)
        elif not job.running and self.promote and job.starts:
            until = job.waiting_since + self.promote * job.executed(now)
        waits, place = self._place(job, queue)
        if waits and job.devices:
            until = now  # once the waiting jobs have had their turn, it is one of the running jobs
        return (queue, *self.within(job, queue, now), waits, place), until

    def within(self, job: JobView, queue: int, now: float) -> Key:
        """The order of jobs of one queue, before running jobs are preferred."""
        return ()

    def _place(self, job: JobView, queue: int) -> tuple[float, float]:
        """Whether the job is ranked as a waiting one, and its place among those. Depends on its present rank."""
        if self.order == "start":
            return 0.0, math.inf if job.started is None else job.started
        waits = 0.0 if job.devices else 1.0
        if job.entry is None:
            return waits, job.changed
        *_, waited, place = before = job.entry[0]
        if before[0] != queue:
            return (1.0 if self.order == "simulator" else waits), job.changed
        if waited == waits:
            return waits, place
        return waits, -job.changed if waits else job.changed

    def starving(self, job: JobView, now: float) -> bool:
        if not self.promote or job.running or not job.starts:
            return False
        return (now - job.waiting_since) * (1 + _ROUNDING) >= self.promote * job.executed(now)

    def decide(self, view: VcView, now: float) -> PolicyActions:
        def why(job: JobView) -> str:
            return f"queue {int(_queue(job))}, {job.recent_service(now):.0f} device-seconds so far"

        yield from by_rank(
            view, why, starving=(lambda job: self.starving(job, now)) if self.promote else None
        )


class Gittins(Tiresias):
    def __init__(
        self,
        *,
        queues: tuple[float, ...] = (500.0, 10_000.0),
        promote: float = 0.0,
        order: str = "running",
        services: tuple[float, ...] = (),
    ) -> None:
        super().__init__(queues=queues, promote=promote, order=order)
        self._given = Histogram(services) if services else None

    def within(self, job: JobView, queue: int, now: float) -> Key:
        """The remaining service depends on all service, also on borrowed devices; the quantum on guaranteed service only."""
        if queue == len(self.queues):
            return (0.0,)
        known = self._given or job.vc.history
        return (-gittins_index(known, job.service(now), self.queues[queue] - job.recent_service(now)),)


def gittins_index(services: Histogram, attained: float, quantum: float) -> float:
    """P(a job with this attained service finishes within the quantum) / E(service until then)."""
    finishing, expected, alive = 0, 0.0, 0
    for service, number in services.steps():
        if service <= attained:
            continue
        alive += number
        finishing += number * (service <= attained + quantum)
        expected += number * min(service - attained, quantum)
    return finishing / expected if alive else 0.0


def _queue(job: JobView) -> float:
    assert job.entry is not None
    return job.entry[0][0]

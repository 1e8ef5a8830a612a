"""How long one scheduling tick takes under each elastic policy: 1,000 running and 5,000 waiting jobs on 10,000 devices.

CPU milliseconds against the limit: 100 ms, and 2 s for Gavel, which solves a linear program. The running jobs are elastic and
hold all devices, the waiting ones want eight at once. In each measured tick a job ends and another comes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from figures import Figure, Options, Target, main
from gyrostat.core.devices import Fleet
from gyrostat.core.profile import Profile, Speed
from gyrostat.core.request import Affinity, JobId, JobRequest
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sched.planner.throughput import PlannedThroughput, workload_name
from gyrostat.sched.policies import find_policy
from gyrostat.sched.port import Change, Finished, Snapshot, Submitted
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tenant_state import Vc
from gyrostat.sched.tick import tick
from pairs import Pair, show_progress

RUNNING, WAITING = 1_000, 5_000
FLEET = "v100:625x8,p100:375x8,k80:250x8"
SPEEDS = {"v100": 281.0, "p100": 168.0, "k80": 40.0}
LIMITS_MS = {"elastic-tiresias": 100.0, "easyscale": 100.0, "wfs": 100.0, "optimus": 100.0, "gavel": 2_000.0}
PROFILES = {
    f"model{number}": Profile(
        f"model{number}",
        {
            name: Speed(((64, rate * (0.5 + 0.05 * number)),), ((2, 0.01), (8, 0.02 + 0.01 * number)))
            for name, rate in SPEEDS.items()
        },
    )
    for number in range(20)
}


def measure(options: Options) -> Iterator[Figure]:
    for policy, limit in LIMITS_MS.items():
        ticks = Ticks(policy)
        pairs = []
        for number in range(options.pairs):
            pairs.append(Pair(ticks.milliseconds(), limit))
            show_progress(number + 1, options.pairs, f"{policy}: {pairs[-1].ours:.1f} ms")
        yield Figure(
            name=f"{policy}: one tick, {ticks.running} running and {ticks.waiting} waiting jobs at the end",
            ours="tick",
            theirs="limit",
            unit="ms",
            pairs=pairs,
            target=Target(at_most=1.0),
        )


class Ticks:
    """A cluster in full swing under one policy."""

    def __init__(self, policy: str) -> None:
        self._draw = random.Random(1)
        self._number = 0
        fleet = Fleet.parse(FLEET)
        vc = Vc(name="all", policy=find_policy(policy))
        self._scheduler_state = SchedulerState(fleet, [vc], NodePlacer(fleet), PlannedThroughput(PROFILES))
        self._now = 0.0
        self._round = 360.0 if policy == "gavel" else 30.0
        self._tick([Submitted(self._request(elastic=True)) for _ in range(RUNNING)])
        self._tick([Submitted(self._request(elastic=False)) for _ in range(WAITING)])
        self._tick([])

    @property
    def running(self) -> int:
        return sum(job.running for job in self._scheduler_state.jobs.values())

    @property
    def waiting(self) -> int:
        return len(self._scheduler_state.jobs) - self.running

    def milliseconds(self) -> float:
        ended = next(job.id for job in self._scheduler_state.jobs.values() if job.running)
        return self._tick([Finished(ended), Submitted(self._request(elastic=False))])

    def _tick(self, changes: list[Change]) -> float:
        self._now += self._round
        began = time.process_time()
        tick(self._scheduler_state, Snapshot(self._now, tuple(changes)))
        return 1000 * (time.process_time() - began)

    def _request(self, *, elastic: bool) -> JobRequest:
        self._number += 1
        return JobRequest(
            id=JobId(f"job{self._number}"),
            vc="all",
            submitted=self._now,
            devices=10 if elastic else 8,
            min_devices=8 if elastic else None,
            max_devices=16 if elastic else None,
            virtual_workers=16,
            affinity=Affinity.SOFT,
            workload=workload_name(f"model{self._draw.randrange(20)}", 64),
        )


if __name__ == "__main__":
    main(__doc__ or "", measure)

"""Which faults are injected, and when: a pure function of a seed. Their targets depend on the processes that run then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

_T = TypeVar("_T")
SHORTEST_STOP_S, LONGEST_STOP_S = 0.05, 3.0
LATEST_FIRST_S = 6.0
"""The first fault of a round is at most this long after its processes were started: many hit the start of the job."""
MOST_WITHOUT_STEP = 3
"""This many faults at most between two steps: a job that is hit more often than it can start makes no progress."""
_WITH_CHECKPOINTS = 0.7


class StoreKind(StrEnum):
    """Where agents keep their lease."""

    FILE = "file"
    ETCD = "etcd"


class FaultKind(StrEnum):
    KILL = "kill a worker"
    KILL_TWO = "kill two workers"
    STOP = "stop a worker for a while"
    RESIZE = "resize"
    NEWCOMER = "kill a worker that joins"
    FORK_SERVER = "kill a fork server"
    LEADER = "kill the leader"
    LEADER_AND_WORKER = "kill the leader and a worker"
    AGENT = "kill an agent"
    RENDEZVOUS = "kill a rendezvous store"
    ETCD = "kill etcd"
    ETCD_DATA = "kill etcd, its data lost"
    ETCD_STOP = "stop etcd for a while"
    DAEMON = "kill the daemon"
    HOST = "kill the host of a job"
    HOST_FORK_SERVER = "kill the host fork server"
    MIGRATE = "migrate"
    PAUSE = "pause and resume"
    SERVER = "kill a server"
    SERVER_AND_WORKER = "kill a server and a worker"
    SERVER_STOP = "stop a server for a while"
    SERVER_RESIZE = "resize the servers"


_WEIGHTS = {
    FaultKind.KILL: 6,
    FaultKind.KILL_TWO: 2,
    FaultKind.STOP: 3,
    FaultKind.RESIZE: 4,
    FaultKind.NEWCOMER: 3,
    FaultKind.FORK_SERVER: 2,
    FaultKind.LEADER: 3,
    FaultKind.LEADER_AND_WORKER: 1,
    FaultKind.AGENT: 4,
    FaultKind.RENDEZVOUS: 1,
    FaultKind.ETCD: 2,
    FaultKind.ETCD_DATA: 2,
    FaultKind.ETCD_STOP: 2,
    FaultKind.DAEMON: 4,
    FaultKind.HOST: 2,
    FaultKind.HOST_FORK_SERVER: 1,
    FaultKind.MIGRATE: 2,
    FaultKind.PAUSE: 2,
    FaultKind.SERVER: 5,
    FaultKind.SERVER_AND_WORKER: 2,
    FaultKind.SERVER_STOP: 3,
    FaultKind.SERVER_RESIZE: 4,
}
OF_WORKERS = (
    FaultKind.KILL,
    FaultKind.KILL_TWO,
    FaultKind.STOP,
    FaultKind.RESIZE,
    FaultKind.NEWCOMER,
    FaultKind.FORK_SERVER,
)
OF_SERVERS = (
    FaultKind.SERVER,
    FaultKind.SERVER_AND_WORKER,
    FaultKind.SERVER_STOP,
    FaultKind.SERVER_RESIZE,
)
OF_AGENTS = (FaultKind.LEADER, FaultKind.LEADER_AND_WORKER, FaultKind.AGENT, FaultKind.RENDEZVOUS)
OF_ETCD = (FaultKind.ETCD, FaultKind.ETCD_DATA, FaultKind.ETCD_STOP)
OF_CLUSTER = (
    FaultKind.DAEMON,
    FaultKind.HOST,
    FaultKind.HOST_FORK_SERVER,
    FaultKind.MIGRATE,
    FaultKind.PAUSE,
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    after: float
    """Seconds since the previous fault, or since the processes of the round were started."""
    kind: FaultKind
    chances: tuple[float, float]
    """Numbers from 0 to 1 that choose among the running processes."""
    seconds: float
    """How long a process is stopped, a job paused, or until a killed process is restarted."""

    def victims(self, living: Sequence[_T], count: int) -> list[_T]:
        """At most `count` different ones of the living."""
        left, chosen = list(living), []
        for chance in self.chances[:count]:
            if left:
                chosen.append(left.pop(int(chance * len(left))))
        return chosen

    def size(self, most: int) -> int:
        """The number of workers that a resize requests."""
        return 1 + int(self.chances[0] * most)


def plan(seed: int, *, every: float, kinds: Sequence[FaultKind]) -> Iterator[Fault]:
    """Infinitely many faults: the first while the job starts or soon after, the others `every` seconds apart on average."""
    random = Random(f"gyrostat chaos {seed}")
    weights = [_WEIGHTS[kind] for kind in kinds]
    after = random.uniform(0.0, LATEST_FIRST_S)
    while True:
        yield Fault(
            after=after,
            kind=random.choices(list(kinds), weights)[0],
            chances=(random.random(), random.random()),
            seconds=random.uniform(SHORTEST_STOP_S, LONGEST_STOP_S),
        )
        after = random.expovariate(1 / every)


def with_checkpoints(seed: int) -> bool:
    """Whether the job of this round has a checkpoint directory."""
    return Random(f"gyrostat chaos {seed}: checkpoints").random() < _WITH_CHECKPOINTS


def longest_standstill_s(*, start_s: float, timeouts_s: float, faults: int) -> float:
    """A job that completes no step and does not end for longer than this after a step or a fault hangs.

    It is what `faults`, those since the last step, may cost: the time-outs of the target (`timeouts_s`), the delays of
    restarts, which double from one second with each in vain, and the start: ten times what it took the undisturbed run,
    because others may use the machine now, and half a minute at least.
    """
    return (
        LONGEST_STOP_S
        + timeouts_s
        + sum(min(60.0, 2.0**number) for number in range(faults))
        + max(30.0, 10 * start_s)
    )

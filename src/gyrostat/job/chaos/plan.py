"""Which faults are injected, and when: a pure function of a seed. Their targets depend on the processes that run then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

_T = TypeVar("_T")
SHORTEST_STOP_S, LONGEST_STOP_S = 0.05, 3.0


class FaultKind(StrEnum):
    KILL = "kill a worker"
    KILL_TWO = "kill two workers"
    STOP = "stop a worker for a while"
    RESIZE = "resize"
    LEADER = "kill the leader"
    LEADER_AND_WORKER = "kill the leader and a worker"
    AGENT = "kill an agent"


_WEIGHTS = {
    FaultKind.KILL: 8,
    FaultKind.KILL_TWO: 2,
    FaultKind.STOP: 3,
    FaultKind.RESIZE: 5,
    FaultKind.LEADER: 2,
    FaultKind.LEADER_AND_WORKER: 1,
    FaultKind.AGENT: 1,
}
OF_WORKERS = (FaultKind.KILL, FaultKind.KILL_TWO, FaultKind.STOP, FaultKind.RESIZE)
OF_AGENTS = (FaultKind.LEADER, FaultKind.LEADER_AND_WORKER, FaultKind.AGENT)


@dataclass(frozen=True, kw_only=True)
class Fault:
    after: float
    """Seconds since the previous fault, or since training began."""
    kind: FaultKind
    chances: tuple[float, float]
    """Numbers from 0 to 1 that choose among the running processes."""
    seconds: float
    """How long a worker is stopped, or until a killed agent is restarted."""

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
    """Infinitely many faults, `every` seconds apart on average."""
    random = Random(f"gyrostat chaos {seed}")
    weights = [_WEIGHTS[kind] for kind in kinds]
    while True:
        yield Fault(
            after=random.expovariate(1 / every),
            kind=random.choices(list(kinds), weights)[0],
            chances=(random.random(), random.random()),
            seconds=random.uniform(SHORTEST_STOP_S, LONGEST_STOP_S),
        )

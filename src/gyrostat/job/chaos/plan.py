"""Which faults come, and when: a pure function of a seed. Whom they hit depends on who is there then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

_T = TypeVar("_T")
SHORTEST_STOP_S, LONGEST_STOP_S = 0.05, 3.0


class Kind(StrEnum):
    KILL = "kill a worker"
    KILL_TWO = "kill two workers"
    STOP = "stop a worker for a while"
    RESIZE = "resize"
    LEADER = "kill the leader"
    LEADER_AND_WORKER = "kill the leader and a worker"
    AGENT = "kill an agent"


_WEIGHTS = {
    Kind.KILL: 8,
    Kind.KILL_TWO: 2,
    Kind.STOP: 3,
    Kind.RESIZE: 5,
    Kind.LEADER: 2,
    Kind.LEADER_AND_WORKER: 1,
    Kind.AGENT: 1,
}
OF_WORKERS = (Kind.KILL, Kind.KILL_TWO, Kind.STOP, Kind.RESIZE)
OF_AGENTS = (Kind.LEADER, Kind.LEADER_AND_WORKER, Kind.AGENT)


@dataclass(frozen=True, kw_only=True)
class Fault:
    after: float
    """Seconds since the one before, or since training began."""
    kind: Kind
    chances: tuple[float, float]
    """Numbers from 0 to 1 that choose among those who are there."""
    seconds: float
    """How long a worker is stopped, or how long an agent that was killed is away."""

    def victims(self, living: Sequence[_T], count: int) -> list[_T]:
        """At most `count` of those who live, all different."""
        left, chosen = list(living), []
        for chance in self.chances[:count]:
            if left:
                chosen.append(left.pop(int(chance * len(left))))
        return chosen

    def size(self, most: int) -> int:
        """The number of workers that a resize asks for."""
        return 1 + int(self.chances[0] * most)


def plan(seed: int, *, every: float, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Without end, `every` seconds on average."""
    random = Random(f"gyrostat chaos {seed}")
    weights = [_WEIGHTS[kind] for kind in kinds]
    while True:
        yield Fault(
            after=random.expovariate(1 / every),
            kind=random.choices(list(kinds), weights)[0],
            chances=(random.random(), random.random()),
            seconds=random.uniform(SHORTEST_STOP_S, LONGEST_STOP_S),
        )

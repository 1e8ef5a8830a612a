"""Several agents on one file store, on a clock that tests set, in every order that Hypothesis can think of.

Between any two of its steps an agent may be stopped for any time: its request waits to be carried out, its answer to be
delivered, what the watch saw lies about. Requests and answers get lost, agents die and new ones come.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.core.clock import VirtualClock
from gyrostat.core.errors import Deposed
from gyrostat.job.nodes.lease.base import Lease
from gyrostat.job.nodes.lease.election import (
    Acquire,
    Election,
    Event,
    Lead,
    LeaseRefused,
    LeaseSeen,
    LeaveElection,
    Look,
    Release,
    Renew,
    Renewed,
    TimePassed,
    Timing,
    Unreachable,
    Won,
)
from gyrostat.job.nodes.lease.file import FileStore

TIMING = Timing(ttl=10.0, agents=250)
AGENTS = 3
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Agent:
    def __init__(self, name: str, directory: Path, now: Callable[[], float], world: World) -> None:
        self.store = FileStore(directory, clock=now, boot="one")
        self.election = Election(name, TIMING, random.Random(name))
        self.requests: list[Look | Acquire | Renew | Release] = []
        self.inbox: list[Event] = []
        self.last_token: int | None = None
        self._now, self._world = now, world

    def handle(self, event: Event) -> None:
        for instruction in self.election.handle(event, self._now()):
            if isinstance(instruction, Lead):
                self._world.tokens_of_leaders.append(instruction.token)
                self.last_token = instruction.token
            elif isinstance(instruction, Look | Acquire | Renew | Release):
                self.requests.append(instruction)

    def carry_out(self) -> None:
        """The oldest request reaches the store; the answer is on its way."""
        if not self.requests:
            return
        match self.requests.pop(0):
            case Look():
                self.inbox.append(LeaseSeen(self.store.current(), answer=True))
            case Acquire():
                got = self.store.acquire(self.election.me, TIMING.ttl)
                self.inbox.append(Won(got) if isinstance(got, Lease) else LeaseSeen(got, answer=True))
            case Renew(lease):
                try:
                    self.inbox.append(Renewed(self.store.renew(lease)))
                except Deposed:
                    self.inbox.append(LeaseRefused(lease.token))
            case Release(lease):
                self.store.release(lease)

    def lose_request(self) -> None:
        if self.requests and not isinstance(self.requests.pop(0), Release):
            self.inbox.append(Unreachable("lost"))

    def lose_answer(self) -> None:
        """What the watch saw is not an answer; that may be late, but is not lost."""
        answers = [e for e in self.inbox if not (isinstance(e, LeaseSeen) and not e.answer)]
        if answers:
            self.inbox[self.inbox.index(answers[0])] = Unreachable("lost")

    def watch(self) -> None:
        self.inbox.append(LeaseSeen(self.store.current()))

    def deliver(self, which: int) -> None:
        """Answers and what the watch saw overtake one another; there is at most one answer."""
        if self.inbox:
            self.handle(self.inbox.pop(which % len(self.inbox)))

    def turn(self) -> None:
        """As it goes when nothing is slow and nothing is lost."""
        self.watch()
        while self.inbox:
            self.deliver(0)
        self.handle(TimePassed())
        while self.requests:
            self.carry_out()
        while self.inbox:
            self.deliver(0)

    def write(self) -> None:
        if self.last_token is None:
            return
        try:
            self.store.put("by", str(self.last_token).encode(), self.last_token)
        except Deposed:
            return
        in_force = self.store.current().lease
        assert in_force is not None
        assert in_force.token == self.last_token
        self._world.tokens_of_writes.append(self.last_token)


class World:
    def __init__(self, directory: Path, now: Callable[[], float]) -> None:
        self._directory, self._now = directory, now
        self._born = 0
        self.tokens_of_leaders: list[int] = []
        self.tokens_of_writes: list[int] = []
        self.agents = [self._new_agent() for _ in range(AGENTS)]

    def _new_agent(self) -> Agent:
        self._born += 1
        return Agent(f"agent-{self._born}", self._directory, self._now, self)

    def replace(self, index: int) -> None:
        """It dies as it stands, and a new one comes."""
        self.agents[index] = self._new_agent()

    def leave(self, index: int) -> None:
        agent = self.agents[index]
        agent.handle(LeaveElection())
        while agent.requests:
            agent.carry_out()
        while agent.inbox:
            agent.deliver(0)
        while agent.requests:
            agent.carry_out()
        self.agents[index] = self._new_agent()

    def leaders(self) -> list[str]:
        now = self._now()
        return [agent.election.me for agent in self.agents if now < agent.election.leads_until]

    def check_tokens(self) -> None:
        assert self.tokens_of_leaders == sorted(set(self.tokens_of_leaders))
        assert self.tokens_of_writes == sorted(self.tokens_of_writes)

    def run(self, agents: list[Agent], seconds: float, pass_time: Callable[[float], None]) -> Iterator[None]:
        """All goes well for these; the others stand still. Pauses wherever something may have gone wrong."""
        for _ in range(int(seconds / 0.25)):
            for agent in agents:
                agent.turn()
                yield
            pass_time(0.25)
            yield


who = st.integers(0, AGENTS - 1)
moves = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 1.0, 3.0, 8.9, 9.1, 10.0, 25.0]), st.just(0)),
    st.tuples(st.sampled_from(["tick", "carry_out", "deliver", "watch", "turn"]), who, st.integers(0, 2)),
    st.tuples(st.sampled_from(["lose_request", "lose_answer", "write", "replace", "leave"]), who, st.just(0)),
    st.tuples(st.sampled_from(["all_run", "all_but_one_run"]), who, st.integers(1, 24)),
)


def play(
    world: World, script: list[tuple[str, float, int]], pass_time: Callable[[float], None], *, alone: bool
) -> None:
    for move, what, which in script:
        for _ in steps(world, move, what, which, pass_time):
            if alone:
                assert len(world.leaders()) <= 1, world.leaders()
            world.check_tokens()


def steps(
    world: World, move: str, what: float, which: int, pass_time: Callable[[float], None]
) -> Iterator[None]:
    if move == "wait":
        pass_time(what)
    elif move in ("replace", "leave"):
        getattr(world, move)(int(what))
    elif move == "all_run":
        yield from world.run(world.agents, which, pass_time)
    elif move == "all_but_one_run":
        stopped = world.agents[int(what)]
        yield from world.run([agent for agent in world.agents if agent is not stopped], which, pass_time)
        stopped.write()
    elif move == "tick":
        world.agents[int(what)].handle(TimePassed())
    elif move == "deliver":
        world.agents[int(what)].deliver(which)
    else:
        getattr(world.agents[int(what)], move)()
    yield


@given(st.lists(moves, max_size=40))
@settings(max_examples=100, deadline=None)
def test_at_most_one_leads_at_any_time_and_one_does_in_the_end(script: list[tuple[str, float, int]]) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        clock = VirtualClock(1000.0)

        def pass_time(seconds: float) -> None:
            clock.advance(clock.now() + seconds)

        world = World(Path(directory), clock.now)
        play(world, script, pass_time, alone=True)
        play(world, [("all_run", 0, 50)], pass_time, alone=True)
        (leader,) = world.leaders()
        followed = [agent.election.role.value for agent in world.agents if agent.election.me != leader]
        assert followed == ["following"] * (AGENTS - 1)


class TurnedClock:
    """A clock that a test sets forward and back."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


@given(
    st.lists(
        st.one_of(moves, st.tuples(st.just("wait"), st.sampled_from([-500.0, -9.0, -0.5]), st.just(0))),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_a_clock_that_goes_back_lets_no_old_leader_write_and_nobody_wait_for_ever(
    script: list[tuple[str, float, int]],
) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        clock = TurnedClock()

        def pass_time(seconds: float) -> None:
            clock.time += seconds

        world = World(Path(directory), clock.now)
        play(world, script, pass_time, alone=False)
        for agent in range(AGENTS):  # Those that began before the jump count on a time that has not come yet.
            world.replace(agent)
        play(world, [("all_run", 0, 50)], pass_time, alone=False)
        assert len(world.leaders()) == 1

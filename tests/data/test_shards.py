"""Every sample exactly once per epoch, whatever workers do: counted sample by sample over thousands of random schedules."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gyrostat.core.errors import ForeignCheckpoint, MalformedState, Misuse, UsageError
from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.messages import (
    AskShard,
    EpochOver,
    ReportVerdict,
    ReturnedShards,
    Shard,
    ShardReport,
    WaitForShard,
)
from gyrostat.data.shards.queues import Queues
from gyrostat.data.shards.speed import Speeds, portion
from tests.data.shard_world import LEASE, World

SCHEDULES = 10_000


def random_layout(draw: random.Random) -> ShardLayout:
    if draw.random() < 0.5:
        return ShardLayout.of_indices(draw.randint(1, 40), draw.randint(1, 8))
    files = [(f"part-{number}", draw.randint(0, 12)) for number in range(draw.randint(1, 5))]
    return ShardLayout.of_files([*files, ("last", 1)], draw.randint(1, 8))


def run_schedule(seed: int) -> tuple[Counter[str], int]:
    """One life of a job; which things happened in it, and how many reports were refused."""
    draw = random.Random(seed)
    world = World(random_layout(draw), seed=seed, epochs=draw.randint(1, 2), grain=draw.randint(1, 3))
    happened: Counter[str] = Counter()
    for _ in range(draw.randint(5, 50)):
        what = draw.choices(
            ["join", "ask", "work", "zombie", "leave", "die", "wait", "save", "restart"],
            weights=[4, 10, 14, 6, 2, 2, 4, 2, 2],
        )[0]
        if what == "zombie":
            if not world.zombies:
                continue
            world.work(draw.choice(world.zombies), draw.randint(0, 4))
        elif what in ("ask", "work", "leave", "die"):
            if not world.workers:
                continue
            worker = draw.choice(world.workers)
            match what:
                case "ask":
                    world.ask(worker)
                case "work":
                    world.work(worker, draw.randint(0, 6))
                case "leave":
                    world.leave(worker)
                case "die":
                    world.die(worker, noticed=draw.random() < 0.5, really=draw.random() < 0.5)
        elif what == "wait":
            world.wait(draw.choice([0.1, 1.0, LEASE / 2, LEASE, 3 * LEASE]))
        elif what == "restart":
            before = len(world.workers)
            world.restart(survivors=draw.random() < 0.7)
            for _ in range(before):
                world.join()
                world.ask(world.workers[-1])
        else:
            {"join": world.join, "save": world.save}[what]()
        happened[what] += 1
        world.check()
    world.finish()
    return happened, world.refused


def test_ten_thousand_random_schedules() -> None:
    happened: Counter[str] = Counter()
    refused = 0
    for seed in range(SCHEDULES):
        events, reports = run_schedule(seed)
        happened += events
        refused += reports
    assert min(happened.values()) > 1000, happened
    assert len(happened) == 9
    assert refused > 1000, "schedules without expired leases prove little"


class ShardMachine(RuleBasedStateMachine):
    """The same world, with Hypothesis looking for the shortest life that breaks it."""

    @initialize(samples=st.integers(1, 30), shard_size=st.integers(1, 7), grain=st.integers(1, 3))
    def begin(self, samples: int, shard_size: int, grain: int) -> None:
        self.world = World(ShardLayout.of_indices(samples, shard_size), seed=0, epochs=2, grain=grain)

    def worker(self, number: int) -> Any:
        return self.world.workers[number % len(self.world.workers)]

    @rule()
    def join(self) -> None:
        self.world.join()

    @precondition(lambda self: self.world.workers)
    @rule(number=st.integers(0, 5))
    def ask(self, number: int) -> None:
        self.world.ask(self.worker(number))

    @precondition(lambda self: self.world.workers)
    @rule(number=st.integers(0, 5), samples=st.integers(0, 5))
    def work(self, number: int, samples: int) -> None:
        self.world.work(self.worker(number), samples)

    @precondition(lambda self: self.world.zombies)
    @rule(number=st.integers(0, 5), samples=st.integers(0, 5))
    def zombie(self, number: int, samples: int) -> None:
        self.world.work(self.world.zombies[number % len(self.world.zombies)], samples)

    @precondition(lambda self: self.world.workers)
    @rule(number=st.integers(0, 5))
    def leave(self, number: int) -> None:
        self.world.leave(self.worker(number))

    @precondition(lambda self: self.world.workers)
    @rule(number=st.integers(0, 5), noticed=st.booleans(), really=st.booleans())
    def die(self, number: int, noticed: bool, really: bool) -> None:
        self.world.die(self.worker(number), noticed=noticed, really=really)

    @rule(seconds=st.sampled_from([0.1, 1.0, LEASE, 2 * LEASE]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def save(self) -> None:
        self.world.save()

    @rule(survivors=st.booleans())
    def restart(self, survivors: bool) -> None:
        self.world.restart(survivors=survivors)

    @invariant()
    def every_sample_is_in_one_place(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


ShardMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShardMachine = ShardMachine.TestCase


def queues(samples: int = 12, shard_size: int = 4, **options: Any) -> Queues:
    return Queues(
        ShardLayout.of_indices(samples, shard_size), **({"shuffle": False, "lease_seconds": LEASE} | options)
    )


def test_requests_and_their_exact_answers() -> None:
    q = queues(8)
    assert q.ask(AskShard("a", 0), 0.0) == Shard(0, 0, 0, None, 0, 4)
    assert q.ask(AskShard("b", 0), 1.0) == Shard(1, 0, 0, None, 4, 6), "what is left is shared fairly by two"
    assert q.ask(AskShard("b", 0), 1.0) == Shard(2, 0, 0, None, 6, 7)
    assert q.ask(AskShard("a", 0), 1.0) == Shard(3, 0, 0, None, 7, 8)
    assert q.ask(AskShard("a", 0), 1.0) == WaitForShard("the last 8 samples of epoch 0 are with a, b")
    assert q.report(ShardReport("a", 0, ((0, 3), (3, 1))), 2.0) == ReportVerdict(True)
    assert (q.todo, q.doing, q.done) == (0, 4, 4)
    assert q.release("a", "left") == [ReturnedShards("a", 0, 1, "left")]
    assert q.ask(AskShard("b", 0), 2.0) == Shard(4, 0, 0, None, 3, 4)
    assert q.report(ShardReport("b", 0, ((1, 2), (2, 1), (4, 1))), 3.0) == ReportVerdict(True)
    assert q.ask(AskShard("b", 0), 3.0) == EpochOver(0)
    assert q.ask(AskShard("b", 1), 3.0) == Shard(5, 0, 1, None, 0, 4)
    assert q.ask(AskShard("late", 0), 3.0) == EpochOver(0)


def test_a_silent_worker_loses_its_shard_and_its_late_report_does_not_count() -> None:
    q = queues(4)
    q.ask(AskShard("slow", 0), 0.0)
    assert q.report(ShardReport("slow", 0, ((0, 1),)), LEASE - 1) == ReportVerdict(True)
    assert q.expire(LEASE + 1) == [], "it reported"
    assert q.expire(2 * LEASE - 1) == [ReturnedShards("slow", 0, 3, "silent for 10 s")]
    assert q.ask(AskShard("other", 0), 2 * LEASE) == Shard(1, 0, 0, None, 1, 4)
    late = q.report(ShardReport("slow", 0, ((0, 4),)), 2 * LEASE)
    assert late == ReportVerdict(
        False, "shard 0 is not with 'slow' (any more); drop this update and ask again"
    )
    assert (q.doing, q.done) == (3, 1)


def test_a_lease_that_ran_out_unnoticed_is_renewed_by_a_report() -> None:
    q = queues(4)
    q.ask(AskShard("slow", 0), 0.0)
    assert q.report(ShardReport("slow", 0, ((0, 2),)), 5 * LEASE) == ReportVerdict(True)
    assert q.expire(5.5 * LEASE) == []


def test_a_held_shard_that_is_not_listed_is_not_renewed() -> None:
    q = queues(8)
    q.ask(AskShard("a", 0), 0.0)
    q.ask(AskShard("a", 0), 0.0)
    q.report(ShardReport("a", 0, ((0, 1),)), LEASE / 2)
    assert q.expire(LEASE) == [ReturnedShards("a", 1, 4, "silent for 10 s")]
    q.report(ShardReport("a", 0, ((0, 1),)), LEASE)
    assert q.ask(AskShard("b", 0), LEASE) == Shard(2, 0, 0, None, 4, 6)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (ShardReport("a", 0, ((0, 5),)), "offset 5 in shard 0: it has 4, and 2 were reported"),
        (ShardReport("a", 0, ((0, 1),)), "offset 1 in shard 0: it has 4, and 2 were reported"),
        (ShardReport("b", 0, ((0, 3),)), "is not with 'b'"),
        (ShardReport("a", 0, ((0, 3), (7, 1))), "shard 7 is not with 'a'"),
        (ShardReport("a", 1, ((0, 3),)), "of term 1; this is term 0"),
    ],
)
def test_a_report_that_does_not_hold_changes_nothing(report: ShardReport, says: str) -> None:
    q = queues(8)
    q.ask(AskShard("a", 0), 0.0)
    q.report(ShardReport("a", 0, ((0, 2),)), 0.0)
    before = q.to_state()
    verdict = q.report(report, 0.0)
    assert not verdict.accepted
    assert says in verdict.reason
    assert q.to_state() == before


def test_an_epoch_cannot_begin_before_the_one_before_is_over() -> None:
    q = queues(8)
    q.ask(AskShard("a", 0), 0.0)
    with pytest.raises(Misuse, match="epoch 0 is not over: 8 samples"):
        q.ask(AskShard("a", 1), 0.0)


def simulate(speeds: dict[str, float], *, samples: int, shard_size: int) -> tuple[Counter[str], float, float]:
    """Workers of these speeds (samples per second) share an epoch; samples of each, first and last idle moment."""
    q = queues(samples, shard_size)
    free = dict.fromkeys(speeds, 0.0)
    trained: Counter[str] = Counter()
    finished: dict[str, float] = {}
    while len(finished) < len(speeds):
        worker = min((w for w in speeds if w not in finished), key=free.__getitem__)
        shard = q.ask(AskShard(worker, 0), free[worker])
        if not isinstance(shard, Shard):
            finished[worker] = free[worker]
            continue
        for offset in range(1, len(shard) + 1):
            free[worker] += 1 / speeds[worker]
            assert q.report(ShardReport(worker, 0, ((shard.lease, offset),)), free[worker]).accepted
        trained[worker] += len(shard)
    return trained, min(finished.values()), max(finished.values())


def test_fast_workers_get_more_and_none_waits_for_a_straggler() -> None:
    trained, first, last = simulate({"a": 1, "b": 1, "c": 1, "slow": 0.2}, samples=3200, shard_size=100)
    assert trained.total() == 3200
    assert all(980 <= trained[name] <= 1020 for name in "abc")
    assert 180 <= trained["slow"] <= 220
    # A whole shard takes the straggler 500 s. Everybody is done within one and a half percent of the epoch.
    assert last - first < 0.015 * last


def test_a_straggler_gets_its_share_of_a_shard() -> None:
    q = queues(10_000, 100)
    took = {"a": 1.0, "b": 1.0, "slow": 4.0}
    for name in took:
        q.ask(AskShard(name, 0), 0.0)
    for lease, (name, seconds) in enumerate(took.items()):
        q.report(ShardReport(name, 0, ((lease, 100),)), seconds)
    assert q.ask(AskShard("slow", 0), 4.0) == Shard(3, 0, 0, None, 300, 325)
    assert q.ask(AskShard("a", 0), 4.0) == Shard(4, 0, 0, None, 325, 400), "the rest of it"
    assert q.ask(AskShard("a", 0), 4.0) == Shard(5, 0, 0, None, 400, 500)


def test_waiting_for_others_does_not_make_a_straggler() -> None:
    speeds = Speeds()
    for name in ("a", "b", "c"):
        speeds.join(name, 0.0)
        speeds.report(name, 100, 1.0)
    speeds.wait("a")
    for name in ("a", "b"):
        speeds.begin(name, 100.0)
        speeds.report(name, 100, 101.0)
    assert speeds.share("a") == 1.0
    assert speeds.share("b") < 0.8, "it held a shard all that time"


@pytest.mark.parametrize(
    ("available", "todo", "workers", "share", "grain", "gets"),
    [
        (100, 10_000, 4, 1.0, 1, 100),
        (100, 10_000, 4, 0.25, 1, 25),
        (100, 10_000, 4, 0.25, 32, 32),
        (100, 100, 4, 1.0, 1, 25),
        (100, 100, 4, 0.1, 8, 16),
        (3, 3, 8, 1.0, 8, 3),
        (1, 10_000, 8, 0.001, 1, 1),
    ],
)
def test_portions(available: int, todo: int, workers: int, share: float, grain: int, gets: int) -> None:
    assert portion(available=available, todo=todo, workers=workers, share=share, grain=grain) == gets


def test_shards_come_in_another_random_order_each_epoch() -> None:
    q = Queues(ShardLayout.of_indices(4000, 4), seed=3)
    orders = []
    for epoch in range(2):
        order = []
        while isinstance(shard := q.ask(AskShard("a", epoch), 0.0), Shard):
            order.append(shard.start)
            q.report(ShardReport("a", 0, ((shard.lease, len(shard)),)), 0.0)
        orders.append(order)
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(0, 4000, 4))
    assert sum(a == b for a, b in zip(*orders, strict=True)) < 10
    assert orders[0] != sorted(orders[0])


def test_files_are_never_crossed() -> None:
    layout = ShardLayout.of_files([("a", 5), ("empty", 0), ("b", 3)], 2)
    q = Queues(layout, shuffle=False)
    ranges = []
    while isinstance(shard := q.ask(AskShard("w", 0), 0.0), Shard):
        ranges.append((shard.source, shard.start, shard.stop))
        q.report(ShardReport("w", 0, ((shard.lease, len(shard)),)), 0.0)
    assert ranges == [("a", 0, 2), ("a", 2, 4), ("a", 4, 5), ("b", 0, 2), ("b", 2, 3)]
    assert [layout.shard_of(sample) for sample in range(8)] == [0, 0, 1, 1, 2, 3, 3, 4]


def test_a_million_shards_are_numbers_not_objects() -> None:
    state = json.dumps(Queues(ShardLayout.of_indices(10**9, 1000)).to_state())
    assert len(state) < 500


def test_a_state_says_what_it_was_saved_for() -> None:
    state = queues(12, 4).to_state()
    with pytest.raises(ForeignCheckpoint, match=r"samples = 12 \(here 13\)"):
        queues(13, 4).restore(state, now=0.0)
    with pytest.raises(ForeignCheckpoint, match=r"seed = 0 \(here 1\)"):
        queues(12, 4, seed=1).restore(state, now=0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"todo": "many"},
        {"todo": 13},
        {"returned": [[0, 4], [4, 12], [0, 4]]},
        {"doing": [[1, 2]]},
        {"epoch": None},
    ],
)
def test_a_damaged_state_is_refused(wrong: dict[str, Any]) -> None:
    q = queues(12, 4)
    q.ask(AskShard("a", 0), 0.0)
    with pytest.raises(MalformedState):
        queues(12, 4).restore(q.to_state() | wrong, now=0.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ShardLayout.of_indices(10, 0), "shard_size must be"),
        (lambda: ShardLayout.of_indices(-1, 2), "the dataset has -1 samples"),
        (lambda: ShardLayout.of_files([("x", -2)], 2), "file 'x' has -2 samples"),
        (lambda: queues(grain=0), "grain must be"),
        (lambda: queues(lease_seconds=0.0), "lease_seconds must be"),
    ],
)
def test_bad_input_is_named(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()

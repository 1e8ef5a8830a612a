"""Where traces first differ, and which pairs of runs are worth explaining."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gyrostat.core.placement import Placement
from gyrostat.job.verify.compare import (
    DifferenceKind,
    Located,
    RunDifference,
    Scope,
    TracedRun,
    compare,
    locate,
    pairs_to_explain,
)
from gyrostat.job.verify.plan import Configuration
from gyrostat.job.verify.trace import Trace, join

NAN = float("nan")


def trace(
    digests: str, losses: Sequence[float | None] = (), *, every: int = 1, differ: str | None = None
) -> Trace:
    """A letter is the digest of a state, after `every` steps each."""
    return Trace(
        steps=every * len(digests),
        digests={every * number: letter for number, letter in enumerate(digests, start=1)},
        losses=dict(enumerate(losses, start=1)),
        workers_differ=differ,
    )


def test_equal() -> None:
    assert compare(trace("abc", [1.0, NAN, None]), trace("abc", [1.0, NAN, None])) is None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (trace("abc"), trace("abd"), RunDifference(kind=DifferenceKind.STATE, step=3, after=2)),
        (trace("abc"), trace("xbc"), RunDifference(kind=DifferenceKind.STATE, step=1)),
        (
            trace("ab", every=5),
            trace("ax", every=5),
            RunDifference(kind=DifferenceKind.STATE, step=10, after=5),
        ),
        (
            trace("ab", [1, 2, 3, 4], every=2),
            trace("ax", [1, 2, 0, 0], every=2),
            RunDifference(kind=DifferenceKind.LOSS, step=3, after=2),
        ),
        (trace("ab", [0.0, 1]), trace("ab", [-0.0, 1]), RunDifference(kind=DifferenceKind.LOSS, step=1)),
        (trace("ab", [None, 1]), trace("ab", [0.0, 1]), RunDifference(kind=DifferenceKind.LOSS, step=1)),
        (trace("ab", [1, 2]), trace("ax", [1, 3]), RunDifference(kind=DifferenceKind.STATE, step=2, after=1)),
        (trace("ab"), trace("abc"), RunDifference(kind=DifferenceKind.STEPS, step=3, after=2)),
        (trace("ab"), trace("a", differ="so"), RunDifference(kind=DifferenceKind.WORKERS, step=1, after=1)),
        (trace("ab"), trace("x", differ="so"), RunDifference(kind=DifferenceKind.STATE, step=1)),
    ],
)
def test_the_first_difference(one: Trace, other: Trace, expected: RunDifference) -> None:
    assert compare(one, other) == expected
    assert compare(other, one) == expected


def test_a_run_that_was_ended_sooner_is_equal() -> None:
    assert compare(trace("abc"), trace("ab"), whole=False) is None
    assert compare(trace("abc", differ="so"), trace("ab"), whole=False) is None
    assert compare(trace("ab", differ="so"), trace("ab", differ="so"), whole=False) is None
    assert compare(trace("ab", differ="so"), trace("ab"), whole=False) == RunDifference(
        kind=DifferenceKind.WORKERS, step=2, after=2
    )
    assert compare(trace("abc"), trace("ax"), whole=False) == RunDifference(
        kind=DifferenceKind.STATE, step=2, after=1
    )


def test_two_halves() -> None:
    first = Trace(steps=2, losses={1: 0.1, 2: 0.2}, digests={2: "a"}, tensors={2: {"w": "1"}})
    second = Trace(steps=4, losses={3: 0.3, 4: 0.4}, digests={4: "b"}, workers_differ="so")
    assert join(first, second) == Trace(
        steps=4,
        losses={1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4},
        digests={2: "a", 4: "b"},
        tensors={2: {"w": "1"}},
        workers_differ="so",
    )
    assert join(first, second).digest == "b"


def test_the_first_tensor_is_the_first_in_natural_order() -> None:
    before = {"w": "1", "b": "2", "a": "3"}
    one = Trace(steps=2, tensors={1: before, 2: {"w": "1", "b": "4", "a": "5"}})
    other = Trace(steps=2, tensors={1: before, 2: {"w": "1", "b": "6", "a": "7", "new": "8"}})
    assert locate(one, other) == Located(step=2, tensors=("b", "a", "new"), total=4)
    assert locate(one, one) is None


EACH, UNEVEN, ONE = (Placement.from_counts(counts) for counts in ([1, 1, 1], [2, 1], [3]))


def runs(each: str, uneven: str, one: str, resumed: str | None, ddp: str | None) -> list[TracedRun]:
    """By the digest they come to; `!` stands for workers that differ."""
    pairs = [
        (Configuration(placement=EACH), each),
        (Configuration(placement=UNEVEN), uneven),
        (Configuration(placement=ONE), one),
        (Configuration(placement=UNEVEN, cut=1, resumed_on=ONE), resumed),
        (Configuration(placement=EACH, reference=True), ddp),
    ]
    return [
        TracedRun(configuration=configuration, trace=trace(digest, differ="so" if digest == "!" else None))
        for configuration, digest in pairs
        if digest is not None
    ]


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ("aaaaa", []),
        ("aaa--", []),
        ("abbbb", [(Scope.PLACEMENT, 1, 0)]),
        ("aabca", [(Scope.PLACEMENT, 0, 2)]),
        ("abcda", [(Scope.PLACEMENT, 0, 1)]),
        ("abcdx", [(Scope.PLACEMENT, 0, 1), (Scope.DDP, 4, 0)]),
        ("aaaxa", [(Scope.RESUME, 1, 3)]),
        ("aaax-", [(Scope.RESUME, 1, 3)]),
        ("aaaab", [(Scope.DDP, 4, 0)]),
        ("aaaxb", [(Scope.RESUME, 1, 3), (Scope.DDP, 4, 0)]),
        ("!!a-b", [(Scope.PLACEMENT, 2, 0)]),
        ("!aa-a", [(Scope.PLACEMENT, 1, 0)]),
    ],
)
def test_pairs_worth_explaining(digests: str, expected: list[tuple[Scope, int, int]]) -> None:
    each, uneven, one, resumed, ddp = (None if letter == "-" else letter for letter in digests)
    assert each
    assert uneven
    assert one
    ran = runs(each, uneven, one, resumed, ddp)
    index = {id(run): number for number, run in enumerate(ran)}
    if resumed is None and ddp is not None:
        index[id(ran[-1])] = 4
    found = [(pair.scope, index[id(pair.one)], index[id(pair.other)]) for pair in pairs_to_explain(ran)]
    assert found == expected


def test_workers_that_differ_in_the_only_run() -> None:
    (run,) = runs("!", "a", "a", None, None)[:1]
    (pair,) = pairs_to_explain([run])
    assert (pair.scope, pair.one, pair.other) == (Scope.PLACEMENT, run, run)

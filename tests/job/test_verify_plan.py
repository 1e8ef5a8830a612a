"""Which configurations `verify` runs."""

from __future__ import annotations

import re

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import Placement
from gyrostat.job.verify.plan import (
    Configuration,
    choose_cut,
    counts,
    default_placements,
    interrupted,
    parse_placements,
)


@pytest.mark.parametrize(
    ("virtual_workers", "expected"),
    [
        (1, [[1]]),
        (2, [[1, 1], [2]]),
        (3, [[1, 1, 1], [2, 1], [3]]),
        (4, [[1, 1, 1, 1], [3, 1], [4]]),
    ],
)
def test_default_placements(virtual_workers: int, expected: list[list[int]]) -> None:
    assert [counts(placement) for placement in default_placements(virtual_workers)] == expected


def test_placements_as_given() -> None:
    assert [counts(each) for each in parse_placements("1,2,3+1,4,2", 4)] == [[4], [2, 2], [3, 1], [1] * 4]
    assert [counts(each) for each in parse_placements("3", 5)] == [[2, 2, 1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,two", "--workers takes numbers of workers, or how many virtual workers each one runs, such as"),
        ("3+2", "--workers 3+2 places 5 virtual workers, but --virtual-workers says 4"),
        ("5", "5 workers cannot share 4 virtual workers"),
        ("0", "at least one worker"),
        ("4+0", "every worker needs at least one virtual worker"),
        ("", "got ''"),
    ],
)
def test_bad_placements(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_placements(text, 4)


def test_no_virtual_workers() -> None:
    with pytest.raises(UsageError, match="at least 1, got 0"):
        default_placements(0)


def test_saved_on_the_last_but_one_and_resumed_on_the_last() -> None:
    first, second, third = default_placements(4)
    assert interrupted((first, second, third), 7) == Configuration(placement=second, cut=7, resumed_on=third)
    assert interrupted((first,), 7) == Configuration(placement=first, cut=7, resumed_on=first)


@pytest.mark.parametrize(
    ("epochs", "cut"),
    [
        ([], None),
        ([0], None),
        ([0, 0], 1),
        ([0, 1], 1),
        ([0] * 10, 5),
        ([0] * 8 + [1] * 8, 7),  # not 8, between two epochs
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], 4),
        ([0, 1, 2, 3], 2),
    ],
)
def test_where_to_save(epochs: list[int], cut: int | None) -> None:
    assert choose_cut(epochs) == cut


def test_names() -> None:
    even, uneven, one = (Placement.from_counts(each) for each in ([2, 2], [3, 1], [4]))
    assert Configuration(placement=even, reference=True).name == "plain DDP, 4 processes"
    assert Configuration(placement=Placement.even(1, 1), reference=True).name == "plain DDP, 1 process"
    assert [Configuration(placement=each).name for each in (even, uneven, one)] == [
        "2 workers",
        "2 workers (3+1)",
        "1 worker",
    ]
    assert (
        Configuration(placement=uneven, cut=7, resumed_on=one).name
        == "2 workers (3+1), saved after step 7, resumed on 1 worker"
    )

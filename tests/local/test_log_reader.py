"""Logs, read part by part while they are written and rotated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.cluster.records import LogChunk
from gyrostat.core.errors import UsageError
from gyrostat.local import log_reader
from gyrostat.local.log_reader import read_part
from gyrostat.local.rotating_log import RotatingFile


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "output.log"


def read_all(
    log: Path, after: str | None = None, *, lines: int | None = None, over: bool = False
) -> list[str]:
    found: list[str] = []
    while True:
        part = read_part(log, after, lines, over=over)
        found += part.lines
        if not part.lines:
            return found
        after = part.next


def test_there_may_be_no_log_yet(log: Path) -> None:
    part = read_part(log, None, None, over=False)
    assert part == LogChunk((), "", complete=True)
    log.write_text("one\n")
    assert read_part(log, part.next, None, over=False).lines == ("one",)


def test_a_part_ends_with_a_whole_line(log: Path) -> None:
    log.write_text("one\ntw")
    first = read_part(log, None, None, over=False)
    assert (first.lines, first.complete) == (("one",), False)
    with log.open("a") as file:
        file.write("o\nthree")
    second = read_part(log, first.next, None, over=False)
    assert second.lines == ("two",)
    third = read_part(log, second.next, None, over=True)
    assert (third.lines, third.complete) == (("three",), True)


@pytest.mark.parametrize(
    ("wanted", "lines"), [(0, []), (1, ["c"]), (2, ["", "c"]), (3, ["a", "", "c"]), (9, ["a", "", "c"])]
)
def test_the_last_lines(log: Path, wanted: int, lines: list[str]) -> None:
    log.write_text("a\n\nc\n")
    assert read_all(log, lines=wanted) == lines


def test_the_last_lines_over_rotated_files(log: Path) -> None:
    log.with_name("output.log.2").write_text("1\n2\n")
    log.with_name("output.log.1").write_text("3\n")
    log.write_text("")
    assert [read_all(log, lines=wanted) for wanted in (1, 2, 3, 4)] == [
        ["3"],
        ["2", "3"],
        ["1", "2", "3"],
        ["1", "2", "3"],
    ]


def test_a_long_line_comes_in_parts(log: Path) -> None:
    log.write_text("x" * (log_reader.MOST_BYTES + 10) + "\nshort\n")
    assert [len(line) for line in read_all(log)] == [log_reader.MOST_BYTES, 10, 5]


def test_carriage_returns_and_bad_bytes_stay_in_their_line(log: Path) -> None:
    log.write_bytes(b"10%\r20%\n\xff\xfe\nu\xe2\x80\xa8v\n")
    assert read_all(log) == ["10%\r20%", "\ufffd\ufffd", "u\u2028v"]


@given(
    sizes=st.lists(st.integers(0, 30), max_size=40),
    look=st.sets(st.integers(0, 40)),
    largest=st.integers(8, 64),
)
def test_a_reader_that_keeps_up_misses_nothing(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], look: set[int], largest: int
) -> None:
    log = tmp_path_factory.mktemp("log") / "output.log"
    file = RotatingFile(log, largest=largest, kept=50)
    written: list[str] = []
    found: list[str] = []
    after = None
    for number, size in enumerate(sizes):
        line = f"{number}:" + "x" * size
        file.write(line)
        written.append(line)
        if number in look:
            part = read_part(log, after, None, over=False)
            found += part.lines
            after = part.next or None
    file.close()
    assert found + read_all(log, after) == written


def test_a_reader_that_was_away_too_long_goes_on_with_the_oldest(log: Path) -> None:
    file = RotatingFile(log, largest=4, kept=2)
    file.write("old")
    place = read_part(log, None, None, over=False).next
    for line in ("aaa", "bbb", "ccc", "ddd", "eee"):
        file.write(line)
    file.close()
    assert read_all(log, place) == ["ccc", "ddd", "eee"]


@pytest.mark.parametrize("place", ["x", "1", "1:2", "-1:2:3", "1:2:3:4", "../etc/passwd", "1:2:" + "9" * 40])
def test_a_position_is_one_of_an_earlier_response(log: Path, place: str) -> None:
    log.write_text("one\n")
    with pytest.raises(UsageError, match="a position in a log is"):
        read_part(log, place, None, over=False)

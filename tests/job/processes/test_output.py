"""Bytes to lines."""

from __future__ import annotations

from pathlib import Path

from gyrostat.job.processes.output import LineSplitter, LogFiles


def test_lines_are_put_together_from_pieces() -> None:
    lines = LineSplitter()
    assert list(lines.feed(b"on")) == []
    assert list(lines.feed(b"e\ntwo\nthr")) == ["one", "two"]
    assert list(lines.end()) == ["thr"]
    assert list(lines.end()) == []


def test_characters_may_be_cut() -> None:
    lines = LineSplitter()
    data = "größe\n".encode()
    assert [line for i in range(len(data)) for line in lines.feed(data[i : i + 1])] == ["größe"]


def test_broken_characters_are_shown_as_such() -> None:
    assert list(LineSplitter().feed(b"\xff\n")) == ["�"]


def test_of_a_progress_bar_the_last_state_remains() -> None:
    lines = LineSplitter()
    assert list(lines.feed(b"\r 1%\r 2%")) == []
    assert list(lines.feed(b"\r 3%\r")) == []
    assert list(lines.feed(b"100%\ndone\r\n")) == ["100%", "done"]


def test_a_line_without_an_end_is_cut() -> None:
    lines = LineSplitter()
    assert [len(line) for line in lines.feed(b"x" * 150_000)] == [65536, 65536]
    assert [len(line) for line in lines.end()] == [150_000 - 2 * 65536]


def test_every_worker_has_its_file(tmp_path: Path) -> None:
    files = LogFiles(tmp_path / "logs")
    for worker in (0, 1):
        files.open(worker)
    files.write(1, "hello")
    files.close()
    assert (tmp_path / "logs/worker-0.log").read_text() == ""
    assert (tmp_path / "logs/worker-1.log").read_text() == "hello\n"

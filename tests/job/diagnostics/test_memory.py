"""The kernel's marks, on files made up as it writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.job.diagnostics.memory import KernelLog, OutOfMemory, counter_file


@pytest.mark.parametrize(
    ("cgroups", "file"),
    [
        ("0::/job.slice/one", "job.slice/one/memory.events"),
        ("0::/in/a/container", "memory.events"),
        ("4:memory:/docker/ab\n2:cpu:/\n0::/", "memory/docker/ab/memory.oom_control"),
        ("4:cpu,memory:/", "memory/memory.oom_control"),
    ],
)
def test_where_it_counts(tmp_path: Path, cgroups: str, file: str) -> None:
    counter = tmp_path / file
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert counter_file(cgroups, tmp_path) == counter


def test_nowhere(tmp_path: Path) -> None:
    assert counter_file("0::/\n1:cpu:/", tmp_path) is None
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\n")
    assert counter_file("0::/", tmp_path) is None


def test_only_what_is_new_is_a_mark(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 4\noom_kill 3\n")
    memory = OutOfMemory(counter)
    assert memory.since_last_call() is None
    counter.write_text("oom 5\noom_kill 4\n")
    assert memory.since_last_call() == f"oom_kill in {counter} went from 3 to 4"
    assert memory.since_last_call() is None


def test_this_machine_counts_somewhere() -> None:
    assert OutOfMemory.here().file.exists()


def test_no_log_says_nothing(tmp_path: Path) -> None:
    log = KernelLog(str(tmp_path / "none"))
    assert log.killed(1) is None
    log.close()

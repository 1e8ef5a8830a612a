"""A job is hosted by at most one process, an attempt at most once; logs are cut before the disk is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.local.host_files import (
    HostOrder,
    ProcessIdentity,
    holding,
    is_due,
    is_hosted,
    read_host,
    read_order,
    read_result,
    register_host,
    write_order,
    write_result,
)
from gyrostat.local.rotating_log import RotatingFile


def order(attempt: int) -> HostOrder:
    return HostOrder(job="j1", attempt=attempt, spec=JobSpec(script="x.py"), slots=(), sockets="/nowhere")


def test_the_lock_says_whether_it_is_hosted(tmp_path: Path) -> None:
    assert not is_hosted(tmp_path)
    with holding(tmp_path) as ours:
        assert ours
        assert is_hosted(tmp_path)
        with holding(tmp_path) as again:
            assert not again
    assert not is_hosted(tmp_path)


def test_an_attempt_is_made_once_and_late_ones_never(tmp_path: Path) -> None:
    write_order(tmp_path, order(3))
    given_order = read_order(tmp_path)
    assert given_order == order(3)
    assert is_due(tmp_path, given_order, 3)
    assert not is_due(tmp_path, given_order, 2)
    result = AttemptResult(
        attempt=3, finished=True, stopped=False, exit_code=0, reason="", step=1, started=True
    )
    write_result(tmp_path, result)
    assert read_result(tmp_path, 3) == result
    assert read_result(tmp_path, 2) is None
    assert not is_due(tmp_path, given_order, 3)


def test_a_process_is_distinguished_from_a_later_one_with_its_id(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = ProcessIdentity.of(child.pid)
        assert found is not None
        assert found.alive()
        other = ProcessIdentity(found.pid, found.started + 1)
        assert not other.alive()
        assert other.end(signal.SIGKILL), "it is gone"
        assert child.poll() is None, "somebody else was killed"
        assert found.end(signal.SIGKILL, timeout_s=60.0)
    assert ProcessIdentity.of(child.pid) is None
    register_host(tmp_path, 4, child.pid)
    host = read_host(tmp_path)
    assert host is not None
    assert (host.attempt, host.host.pid, host.parent) == (4, os.getpid(), None)


def test_only_the_fork_server_of_a_dead_host_is_ended(tmp_path: Path) -> None:
    """That of a living one may serve another job by now."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        register_host(tmp_path, 1, parent.pid)
        register_host(tmp_path, 2, os.getpid())
        assert parent.poll() is None
        parent.communicate(b"\n")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=30)))
def test_rotated_files_end_with_the_last_lines(lines: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "output.log"
        file = RotatingFile(path, largest=100, kept=2)
        for line in lines:
            file.write(line)
        file.close()
        parts = [path.with_name("output.log.2"), path.with_name("output.log.1"), path]
        kept = b"".join(part.read_bytes() for part in parts if part.exists())
        whole = "".join(f"{line}\n" for line in lines).encode()
        assert whole.endswith(kept)
        assert len(kept) >= min(len(whole), 100)
        assert all(part.stat().st_size <= 121 for part in parts if part.exists())
        assert len(list(Path(directory).iterdir())) <= 3

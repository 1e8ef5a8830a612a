"""The processes of a run are found wherever they are, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyrostat.job.chaos.processes import RunProcesses
from gyrostat.job.chaos.target import ManagedProcess

_PARENT_AND_CHILD = "import os, time; os.fork(); print('.', flush=True); time.sleep(1000)"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[RunProcesses]:
    found = RunProcesses(tmp_path)
    yield found
    found.kill_all()
    assert found.living() == []


def test_orphans_are_found_and_others_are_not_touched(tmp_path: Path, processes: RunProcesses) -> None:
    assert processes.living() == []
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT_AND_CHILD], env=processes.environment(), stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.read(4)  # both run
        (child,) = processes.workers({parent.pid})
        assert {one.pid for one in processes.living()} == {parent.pid, child}
        assert not processes.signal(os.getpid(), signal.SIGKILL)
        assert RunProcesses(tmp_path / "other").living() == []
        assert processes.stop(child, 0.0)
        assert processes.workers({parent.pid}) == []
        processes.continue_stopped()
        assert processes.workers({parent.pid}) == [child]
        parent.kill()
        parent.wait()
        assert [one.pid for one in processes.living()] == [child]
        processes.kill_all()
    assert not processes.signal(child, signal.SIGKILL)


def test_a_killed_process_is_restarted_and_one_that_ends_is_reported(
    tmp_path: Path, processes: RunProcesses
) -> None:
    command = [sys.executable, "-c", "print('waits', flush=True); input()"]
    process = ManagedProcess("it", command, tmp_path / "log", processes.environment())
    process.process.wait()  # its standard input is empty: it fails
    (ended,) = process.supervise()
    assert (ended.name, ended.code, process.ended) == ("it", 1, True)
    assert "EOFError" in ended.last_lines[-1]
    assert process.supervise() == []
    assert not process.kill(0.0)
    sleeping = ManagedProcess("it", ["sleep", "1000"], tmp_path / "log", processes.environment())
    first = sleeping.process.pid
    assert sleeping.kill(0.0)
    assert (sleeping.killed, sleeping.ended) == (True, False)
    assert sleeping.supervise() == []
    assert (sleeping.killed, sleeping.process.pid != first) == (False, True)
    processes.kill_all()
    sleeping.process.wait()

"""Who runs a job in a checkpoint directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.job.control import run_file


def test_the_file_exists_while_the_run_lasts(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "checkpoints"
    assert run_file.find(directory) is None
    with run_file.holding(directory, "train.py"):
        assert run_file.find(directory) == run_file.RunFile(pid=os.getpid(), program="train.py")
    assert run_file.find(directory) is None
    assert not (directory / run_file.NAME).exists()


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    with run_file.holding(tmp_path, "train.py"):
        with pytest.raises(UsageError, match=rf"process {os.getpid()} \(train.py\) is running a job"):
            with run_file.holding(tmp_path, "other.py"):
                pass
        assert run_file.find(tmp_path) is not None


def test_what_a_killed_run_left_behind_is_recognised(tmp_path: Path) -> None:
    (tmp_path / run_file.NAME).write_text('{"pid": 1, "program": "train.py"}')
    assert run_file.find(tmp_path) is None
    with run_file.holding(tmp_path, "train.py"):
        assert run_file.find(tmp_path) == run_file.RunFile(pid=os.getpid(), program="train.py")

"""Who runs a job in a checkpoint directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.job import runfile


def test_it_is_there_while_the_run_lasts(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "checkpoints"
    assert runfile.find(directory) is None
    with runfile.holding(directory, "train.py"):
        assert runfile.find(directory) == runfile.RunFile(pid=os.getpid(), program="train.py")
    assert runfile.find(directory) is None
    assert not (directory / runfile.NAME).exists()


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    with runfile.holding(tmp_path, "train.py"):
        with pytest.raises(UsageError, match=rf"process {os.getpid()} \(train.py\) is running a job"):
            with runfile.holding(tmp_path, "other.py"):
                pass
        assert runfile.find(tmp_path) is not None


def test_what_a_killed_run_left_behind_is_recognised(tmp_path: Path) -> None:
    (tmp_path / runfile.NAME).write_text('{"pid": 1, "program": "train.py"}')
    assert runfile.find(tmp_path) is None
    with runfile.holding(tmp_path, "train.py"):
        assert runfile.find(tmp_path) == runfile.RunFile(pid=os.getpid(), program="train.py")

"""What a worker notes is there after its death, whole or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.evidence import RunningMicroBatch
from gyrostat.job.diagnostics.black_box import BlackBox, read


def test_it_survives_a_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "box"
    child = os.fork()
    if child == 0:
        BlackBox(path).note(7, 2, 1, [5, 3, 11])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert read(path) == RunningMicroBatch(step=7, rank=2, number=1, samples=(5, 3, 11), size=3)


@given(samples=st.none() | st.lists(st.integers(0, 2**62), max_size=20))
def test_what_is_noted_is_read(tmp_path_factory: pytest.TempPathFactory, samples: list[int] | None) -> None:
    path = tmp_path_factory.mktemp("box") / "box"
    box = BlackBox(path)
    box.note(1, 0, 0, [1, 2, 3, 4])
    box.note(2, 3, 4, samples)
    noted = None if samples is None else tuple(samples)
    assert read(path) == RunningMicroBatch(step=2, rank=3, number=4, samples=noted, size=len(samples or ()))


def test_of_very_many_samples_the_first_are_noted(tmp_path: Path) -> None:
    BlackBox(tmp_path / "box").note(0, 0, 0, range(100_000))
    found = read(tmp_path / "box")
    assert found is not None
    assert (found.samples, found.size) == (tuple(range(4096)), 100_000)
    assert str(found).endswith("62, 63 … (100000 in all)")


def test_nothing_runs(tmp_path: Path) -> None:
    path = tmp_path / "box"
    assert read(path) is None
    box = BlackBox(path)
    assert read(path) is None
    box.note(0, 0, 0, [1])
    box.clear()
    assert read(path) is None
    path.write_bytes(b"\1" + b"\0" * 10)
    assert read(path) is None


def test_the_content_is_what_counts() -> None:
    first = RunningMicroBatch(step=3, rank=1, number=0, samples=(4, 5), size=2)
    assert first.content == RunningMicroBatch(step=9, rank=0, number=1, samples=(4, 5), size=2).content
    assert first.content != RunningMicroBatch(step=3, rank=1, number=0, samples=(4, 6), size=2).content
    unknown = RunningMicroBatch(step=3, rank=1, number=0)
    assert unknown.content == RunningMicroBatch(step=3, rank=1, number=0).content
    assert unknown.content != RunningMicroBatch(step=4, rank=1, number=0).content

"""`gyrostat.shards` and `gyrostat.batch_end`: the shards of a loop, saves, and errors of misuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gyrostat
from gyrostat.core.errors import DamagedCheckpoint, ForeignCheckpoint, Misuse, UsageError
from gyrostat.data.shards.loop import ShardSource, _Process


@pytest.fixture(autouse=True)
def _one_source_per_test() -> Iterator[None]:
    yield
    if _Process.source is not None:
        _Process.source.close()


class Killed(Exception):
    """Stands for the death of the program: whatever was not saved is lost."""


class Program:
    """A program whose model is a count per sample, kept in files beside the queues."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.source = gyrostat.shards(directory=directory, **options)
        self.seen: Counter[str] = Counter()
        if self.source.resumed_from is not None:
            self.seen = Counter(json.loads((self.source.resumed_from / "seen.json").read_text()))

    def write(self, directory: Path) -> None:
        (directory / "seen.json").write_text(json.dumps(self.seen))

    def run(self, batch_size: int, *, save_at: set[int], die_at: int | None = None) -> None:
        try:
            for shard in self.source:
                for batch in shard.batches(batch_size):
                    if self.source.step == die_at:
                        raise Killed
                    self.seen.update(f"{shard.epoch} {shard.source} {sample}" for sample in batch)
                    gyrostat.batch_end(save=self.write if self.source.step + 1 in save_at else None)
        finally:
            self.source.close()


@given(
    files=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    shard_size=st.integers(1, 6),
    batch_size=st.integers(1, 4),
    save_at=st.sets(st.integers(1, 30), max_size=6),
    deaths=st.lists(st.integers(0, 30), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_once_per_epoch_with_respect_to_the_model_resumed_from(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[int],
    shard_size: int,
    batch_size: int,
    save_at: set[int],
    deaths: list[int],
) -> None:
    directory = tmp_path_factory.mktemp("run")
    names = {f"f{number}": samples for number, samples in enumerate(files)}
    options: dict[str, Any] = {"files": names, "shard_size": shard_size, "epochs": 2, "seed": 1}
    for death in deaths:
        program = Program(directory, **options)
        try:
            program.run(batch_size, save_at=save_at, die_at=death)
        except Killed:
            assert program.source.step == death
    program = Program(directory, **options)
    program.run(batch_size, save_at=save_at)
    everything = [f"{epoch} {name} {i}" for epoch in range(2) for name, n in names.items() for i in range(n)]
    assert program.seen == Counter(everything)


def test_a_loop_without_a_directory() -> None:
    source = gyrostat.shards(10, shard_size=4, epochs=2, shuffle=False)
    batches = []
    for shard in source:
        for batch in shard.batches(3):
            batches.append(batch)
            gyrostat.batch_end()
    assert batches == 2 * [range(3), range(3, 4), range(4, 7), range(7, 8), range(8, 10)]
    assert source.step == 10
    assert source.left == 0


def test_a_loop_that_counts_for_itself() -> None:
    ranges = []
    for shard in gyrostat.shards(files=[("a.rec", 5), ("b.rec", 2)], shard_size=3, shuffle=False):
        ranges.append((shard.source, shard.start, shard.stop))
        gyrostat.batch_end(1)
        gyrostat.batch_end(len(shard) - 1)
    assert ranges == [("a.rec", 0, 3), ("a.rec", 3, 5), ("b.rec", 0, 2)]


def test_a_run_that_was_finished_has_nothing_left(tmp_path: Path) -> None:
    first = Program(tmp_path, samples=6, shard_size=2)
    first.run(2, save_at={3})
    again = Program(tmp_path, samples=6, shard_size=2)
    assert again.source.step == 3
    assert list(again.source) == []
    again.source.close()
    more = Program(tmp_path, samples=6, shard_size=2, epochs=2)
    more.run(2, save_at=set())
    assert Counter(more.seen.values()) == {1: 12}


def test_the_newest_saves_are_kept_and_damaged_ones_passed_over(tmp_path: Path) -> None:
    Program(tmp_path, samples=20, shard_size=2, keep=2).run(2, save_at={2, 4, 6, 8})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000006", "step-00000008"]
    (tmp_path / "step-00000008" / "seen.json").write_text("{}")
    program = Program(tmp_path, samples=20, shard_size=2, keep=2)
    assert program.source.step == 6
    [refused] = program.source.refused
    assert "step-00000008/seen.json is damaged: 2 bytes" in refused
    program.run(2, save_at={8})
    assert program.seen.total() == 20
    resumed = gyrostat.shards(20, shard_size=2, directory=tmp_path)
    assert resumed.resumed_from == tmp_path / "step-00000008.1"
    resumed.close()
    for index in tmp_path.glob("step-*/shards.json"):
        index.write_bytes(index.read_bytes().replace(b'"epoch":0', b'"epoch":1'))
    with pytest.raises(DamagedCheckpoint, match="no save can be used"):
        gyrostat.shards(20, shard_size=2, directory=tmp_path)


def test_saves_are_as_old_as_their_numbers_say(tmp_path: Path) -> None:
    source = gyrostat.shards(8, shard_size=2, directory=tmp_path, keep=2)
    for number in range(12):  # step-00000000, step-00000000.1 … step-00000000.11

        def write(directory: Path, number: int = number) -> None:
            (directory / "number").write_text(str(number))

        source.save(write)
    source.close()
    (tmp_path / "step-by-step.txt").write_text("somebody's notes")
    assert {path.name for path in tmp_path.glob("step-0*")} == {"step-00000000.10", "step-00000000.11"}
    resumed = gyrostat.shards(8, shard_size=2, directory=tmp_path)
    assert resumed.resumed_from is not None
    assert (resumed.resumed_from / "number").read_text() == "11"
    resumed.close()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    program = Program(tmp_path, samples=8, shard_size=2)

    def half(directory: Path) -> None:
        (directory / "seen.json").write_text("half")
        raise OSError("disk full")

    for shard in program.source:
        for _ in shard.batches(2):
            gyrostat.batch_end(save=program.write if program.source.step == 0 else None)
            if program.source.step == 2:
                with pytest.raises(OSError, match="disk full"):
                    program.source.save(half)
    program.source.close()
    resumed = gyrostat.shards(8, shard_size=2, directory=tmp_path)
    assert resumed.step == 1
    assert resumed.left == 6


def test_saves_of_other_data_are_refused(tmp_path: Path) -> None:
    Program(tmp_path, samples=8, shard_size=2).run(2, save_at={1})
    with pytest.raises(ForeignCheckpoint, match=r"samples = 8 \(here 9\)"):
        gyrostat.shards(9, shard_size=2, directory=tmp_path)


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    source = gyrostat.shards(8, shard_size=2, directory=tmp_path)
    second = "import sys, gyrostat; gyrostat.shards(8, shard_size=2, directory=sys.argv[1])"
    command = [sys.executable, "-c", second, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "another process uses the shards of" in ended.stderr
    source.close()
    assert subprocess.run(command).returncode == 0


def test_torch_is_not_imported() -> None:
    program = """
import sys, gyrostat
for shard in gyrostat.shards(10, shard_size=4):
    for batch in shard.batches(2):
        gyrostat.batch_end()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)


def forget_a_batch(source: ShardSource) -> None:
    for shard in source:
        for _ in shard.batches(2):
            pass


def forget_a_shard(source: ShardSource) -> None:
    for _ in source:
        gyrostat.batch_end(1)


def count_wrong(source: ShardSource) -> None:
    for shard in source:
        for _ in shard.batches(2):
            gyrostat.batch_end(3)


def count_too_many(source: ShardSource) -> None:
    for _ in source:
        gyrostat.batch_end(9)


def do_not_count(source: ShardSource) -> None:
    for _ in source:
        gyrostat.batch_end()


def end_before_the_loop(source: ShardSource) -> None:
    gyrostat.batch_end(1)


def end_after_the_loop(source: ShardSource) -> None:
    for shard in source:
        gyrostat.batch_end(len(shard))
    gyrostat.batch_end(1)


def save_nowhere(source: ShardSource) -> None:
    for shard in source:
        gyrostat.batch_end(len(shard), save=lambda path: None)


def begin_another(source: ShardSource) -> None:
    gyrostat.shards(3, shard_size=1)


def go_on_with_a_closed_one(source: ShardSource) -> None:
    source.close()
    next(iter(source))


@pytest.mark.parametrize(
    ("loop", "error", "says"),
    [
        (forget_a_batch, Misuse, "was not ended; call gyrostat.batch_end"),
        (forget_a_shard, Misuse, "3 samples of .* were not reported"),
        (count_wrong, UsageError, "its batch has 2 samples"),
        (count_too_many, UsageError, "4 samples of .* are left"),
        (do_not_count, UsageError, "say how many samples"),
        (end_before_the_loop, Misuse, "outside a shard"),
        (end_after_the_loop, Misuse, "after its end"),
        (save_nowhere, UsageError, "nowhere to save to"),
        (begin_another, Misuse, "in the middle of another"),
        (go_on_with_a_closed_one, Misuse, "this loop over shards is closed"),
    ],
)
def test_misuse_raises(loop: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        loop(gyrostat.shards(8, shard_size=4))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either a number of samples or files"),
        ({"samples": 3, "files": {"a": 3}}, "either a number of samples or files"),
        ({"samples": 3, "shard_size": 0}, "shard_size must be"),
        ({"samples": 3, "epochs": -1}, "epochs must be"),
        ({"samples": 3, "seed": -1}, "seed must be"),
        ({"samples": 3.5}, "3.5 samples"),
        ({"samples": 3, "keep": 0, "directory": "x"}, "keep must be"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        gyrostat.shards(**({"shard_size": 1} | options))

"""A checkpoint whose writing is cut off at any instant: the previous one is found, with all its bits."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyrostat.core.errors import CheckpointError
from gyrostat.engine.checkpoint import CheckpointStore, JobSnapshot
from gyrostat.engine.checkpoint.faultydisk import FaultyDisk, PowerCut
from gyrostat.engine.state.digest import digest

SnapshotAt = Callable[[int], JobSnapshot]


def bits(snapshot: JobSnapshot | None) -> str:
    assert snapshot is not None
    return digest(
        job=snapshot.job,
        progress=str(snapshot.progress),
        shared=snapshot.shared,
        contexts=list(snapshot.contexts),
    )


def found(directory: Path, like: JobSnapshot) -> tuple[int, str, int]:
    """What is found there: step, bits, and how many were refused."""
    result = CheckpointStore(directory).find(like.job, like.fingerprint)
    assert result.snapshot is not None
    return result.snapshot.progress.step, bits(result.snapshot), len(result.refused)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize("forgetful", [False, True], ids=["kept", "forgotten"])
@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
@pytest.mark.parametrize("again", [False, True], ids=["next-step", "same-step"])
def test_power_cut_at_every_call(
    tmp_path: Path, snapshot_at: SnapshotAt, again: bool, torn: bool, forgetful: bool
) -> None:
    before, after = snapshot_at(20), snapshot_at(20 if again else 30)
    base = tmp_path / "base"
    for step in (10, 20):
        CheckpointStore(base, keep=2).save(snapshot_at(step))
    complete = FaultyDisk()
    shutil.copytree(base, tmp_path / "complete")
    CheckpointStore(tmp_path / "complete", keep=2, disk=complete).save(after)
    in_place = len(complete.calls) - complete.calls[::-1].index("sync")  # the last one, of the directory
    assert complete.calls.count("create") == 3
    assert complete.calls.count("rename") == (3 if again else 2)  # aside, into place, and to remove
    for cut_at in range(1, len(complete.calls) + 1):
        directory = tmp_path / f"cut-{cut_at}"
        shutil.copytree(base, directory)
        disk = FaultyDisk(cut_at=cut_at, torn=torn, forgetful=forgetful)
        with pytest.raises(PowerCut):
            CheckpointStore(directory, keep=2, disk=disk).save(after)

        step, digest_found, refused = found(directory, before)

        assert (step, digest_found) in {
            (before.progress.step, bits(before)),
            (after.progress.step, bits(after)),
        }
        assert refused == 0
        if cut_at > in_place:
            assert step == after.progress.step
        CheckpointStore(directory, keep=2).save(snapshot_at(40))  # goes on as if nothing had happened
        assert found(directory, before) == (40, bits(snapshot_at(40)), 0)
        assert names(directory) == [f"step-{step:08d}", "step-00000040"]


@pytest.mark.parametrize("torn", [False, True])
def test_disk_full_at_every_call(tmp_path: Path, snapshot_at: SnapshotAt, torn: bool) -> None:
    base = tmp_path / "base"
    CheckpointStore(base).save(snapshot_at(10))
    complete = FaultyDisk()
    shutil.copytree(base, tmp_path / "complete")
    CheckpointStore(tmp_path / "complete", disk=complete).save(snapshot_at(20))
    into_place = complete.calls.index("rename") + 1
    for full_at in range(1, into_place + 1):
        directory = tmp_path / f"full-{full_at}"
        shutil.copytree(base, directory)
        store = CheckpointStore(directory, disk=FaultyDisk(full_at=full_at, torn=torn))
        with pytest.raises(
            CheckpointError, match=r"step-00000020 could not be written: No space left.*free some"
        ):
            store.save(snapshot_at(20))
        assert names(directory) == ["step-00000010"]
        assert found(directory, snapshot_at(10)) == (10, bits(snapshot_at(10)), 0)


def test_a_first_checkpoint_that_is_cut_off_leaves_none(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    with pytest.raises(PowerCut):
        CheckpointStore(tmp_path / "new", disk=FaultyDisk(cut_at=6)).save(snapshot_at(10))
    result = CheckpointStore(tmp_path / "new").find({}, {})
    assert (result.path, result.snapshot, result.refused) == (None, None, [])
    assert result.usable() is None


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The operating system lets no file grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_an_error_of_the_operating_system(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    CheckpointStore(tmp_path).save(snapshot_at(10))
    with pytest.raises(CheckpointError, match="File too large") as raised:
        with largest_file(100):
            CheckpointStore(tmp_path).save(snapshot_at(20))
    assert isinstance(raised.value.__cause__, OSError)
    assert names(tmp_path) == ["step-00000010"]


def test_a_directory_that_cannot_be_written(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written.*--checkpoint-dir"):
        CheckpointStore(tmp_path / "file" / "below").save(snapshot_at(10))


KILLED = """
    import sys, time, torch
    from gyrostat.core.progress import Progress
    from gyrostat.engine.checkpoint import CheckpointStore, Disk, JobSnapshot

    class Stalling(Disk):
        def sync(self, descriptor):
            print("here", flush=True)
            sys.stdin.read()

    snapshot = JobSnapshot(
        job={"virtual_workers": 2, "seed": 0},
        fingerprint={"torch": "2.13.0", "threads": "1"},
        progress=Progress(step=20),
        shared=torch.zeros(1000),
        contexts=[None],
    )
    CheckpointStore(sys.argv[1], disk=Stalling()).save(snapshot)
"""


def test_a_process_killed_while_it_saves(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    CheckpointStore(tmp_path).save(snapshot_at(10))
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        unfinished = next(name for name in names(tmp_path) if name.startswith(".writing-step-00000020-"))
        CheckpointStore(tmp_path).save(snapshot_at(12))
        assert unfinished in names(tmp_path)  # it is being written: not taken for a leftover
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert found(tmp_path, snapshot_at(10)) == (12, bits(snapshot_at(12)), 0)
    CheckpointStore(tmp_path).save(snapshot_at(30))
    assert names(tmp_path) == ["step-00000010", "step-00000012", "step-00000030"]

"""Damaged, foreign and other checkpoints: each is refused with its reason, and the previous one used."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyrostat.core.errors import (
    DamagedCheckpoint,
    ForeignCheckpoint,
    OtherFingerprint,
    UsageError,
)
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import CheckpointStore, Found, JobSnapshot, describe, load, verify
from gyrostat.engine.checkpoint.manifest import CONTEXTS, MANIFEST, SHARED, from_bytes, to_bytes
from gyrostat.engine.state.digest import digest

SnapshotAt = Callable[[int], JobSnapshot]
FILES = (MANIFEST, SHARED, CONTEXTS)


@pytest.fixture
def newest(tmp_path: Path, snapshot_at: SnapshotAt) -> Path:
    """The newest of two checkpoints."""
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(10))
    return store.save(snapshot_at(20))


def find(directory: Path) -> Found:
    return CheckpointStore(directory).find(
        {"virtual_workers": 2, "seed": 0}, {"torch": "2.13.0", "threads": "1"}
    )


def altered(path: Path, change: Callable[[bytes, int], bytes]) -> Iterator[int]:
    """Change a file at every one of its bytes in turn."""
    original = path.read_bytes()
    for index in range(len(original)):
        path.write_bytes(change(original, index))
        yield index
    path.write_bytes(original)


def flip(data: bytes, index: int) -> bytes:
    return data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :]


def cut(data: bytes, index: int) -> bytes:
    return data[:index]


@pytest.mark.parametrize("change", [flip, cut])
@pytest.mark.parametrize("name", FILES)
def test_every_byte_is_guarded(newest: Path, name: str, change: Callable[[bytes, int], bytes]) -> None:
    for index in altered(newest / name, change):
        result = find(newest.parent)
        assert result.path == newest.with_name("step-00000010"), index
        assert isinstance(result.errors[0], DamagedCheckpoint)
        assert str(newest) in result.refused[0]
        assert name in result.refused[0]
    assert verify(newest) == []
    assert find(newest.parent).path == newest


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_something_appended(newest: Path, name: str) -> None:
    with (newest / name).open("ab") as file:
        file.write(b"\n")
    assert [name in problem for problem in verify(newest)] == [True]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(newest: Path, name: str) -> None:
    (newest / name).unlink()
    assert find(newest.parent).refused == [
        f"checkpoint {newest} is damaged: {name} cannot be read: No such file or directory"
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint(newest: Path, name: str) -> None:
    shutil.copy(newest.with_name("step-00000010") / name, newest / name)
    assert find(newest.parent).path == newest.with_name("step-00000010")


@pytest.mark.parametrize("name", FILES)
def test_links_and_pipes_are_not_followed(newest: Path, name: str, tmp_path: Path) -> None:
    (newest / name).rename(tmp_path / "elsewhere")
    (newest / name).symlink_to(tmp_path / "elsewhere")
    assert [name in problem for problem in verify(newest)] == [True]
    (newest / name).unlink()
    os.mkfifo(newest / name)
    assert [f"{name} is not a regular file" in problem for problem in verify(newest)] == [True]
    (newest / name).unlink()
    (newest / name).mkdir()
    assert [name in problem for problem in verify(newest)] == [True]


def test_a_link_in_place_of_a_checkpoint(newest: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000030").symlink_to(newest)
    (tmp_path / "step-00000040").write_text("")
    result = find(tmp_path)
    assert result.path == newest
    assert ["it is not a directory" in reason for reason in result.refused] == [True, True]


def test_a_renamed_checkpoint(newest: Path) -> None:
    newest.rename(newest.with_name("step-00000099"))
    result = find(newest.parent)
    assert result.path == newest.with_name("step-00000010")
    assert "it was renamed: its manifest says step 20" in result.refused[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, "its format is 2"),
        ({"shared_file": {"size": 2**60, "sha256": "0" * 64}}, "instead of 1152921504606846976"),
        ({"shared_file": {"size": -1, "sha256": "0" * 64}}, "not what gyrostat writes"),
        ({"shared_file": {"size": 1, "sha256": "../../../etc/passwd"}}, "not what gyrostat writes"),
        (
            {"shared": {"tree": {"tensor": 0}, "tensors": [["x", "float32", [2**60], None]]}},
            "which its tensors do not have",
        ),
        ({"shared": {"tree": {"tensor": 9}, "tensors": []}}, "which its tensors do not have"),
        ({"contexts": {"tree": {"pickle": ""}, "tensors": []}}, "its contexts are not a list"),
        ({"job": {"tree": [], "tensors": []}}, "its job is"),
        ({"job": {"tree": {"tensor": 0}, "tensors": []}}, "there is no tensor 0"),
        ({"progress": {"step": "many"}}, "not what gyrostat writes"),
        ({"files": ["/etc/passwd"]}, "not what gyrostat writes"),
    ],
)
def test_absurd_manifests_with_a_right_checksum(newest: Path, changes: dict[str, Any], reason: str) -> None:
    path = newest / MANIFEST
    content = msgspec.to_builtins(from_bytes(path.read_bytes())) | changes
    path.write_bytes(to_bytes(content))
    result = find(newest.parent)
    assert result.path == newest.with_name("step-00000010")
    assert reason in result.refused[0]


def test_another_job(newest: Path) -> None:
    result = CheckpointStore(newest.parent).find({"virtual_workers": 4, "seed": 0}, {})
    assert result.snapshot is None
    assert (
        result.refused[0] == f"checkpoint {newest} is of another job: virtual_workers is 2 there and 4 here"
    )
    with pytest.raises(ForeignCheckpoint, match="there are checkpoints, but none can be used"):
        result.usable()


def test_another_fingerprint(newest: Path) -> None:
    job = {"virtual_workers": 2, "seed": 0}
    result = CheckpointStore(newest.parent).find(job, {"torch": "2.14.0", "isa": "avx2"})
    assert [type(error) for error in result.errors] == [OtherFingerprint, OtherFingerprint]
    assert result.refused[0] == (
        f"checkpoint {newest} has another fingerprint, so bits would differ: "
        "torch is '2.13.0' there and '2.14.0' here; "
        "threads is '1' there and absent here; isa is absent there and 'avx2' here"
    )


def test_the_newest_of_this_job_among_others(newest: Path, snapshot_at: SnapshotAt) -> None:
    foreign = replace(snapshot_at(30), job={"virtual_workers": 3, "seed": 0})
    CheckpointStore(newest.parent).save(foreign)
    result = find(newest.parent)
    assert result.path == newest
    assert [type(error) for error in result.errors] == [ForeignCheckpoint]


def test_an_imported_checkpoint_is_compared_by_what_it_knows(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    imported = replace(snapshot_at(5), job={}, fingerprint={}, contexts=[])
    CheckpointStore(tmp_path).save(imported)
    snapshot = find(tmp_path).usable()
    assert snapshot is not None
    assert not snapshot.contexts
    CheckpointStore(tmp_path).save(replace(imported, job={"seed": 1}))
    assert "seed is 1 there and 0 here" in find(tmp_path).refused[0]


def test_all_of_a_snapshot_comes_back(newest: Path, snapshot_at: SnapshotAt) -> None:
    snapshot, expected = load(newest), snapshot_at(20)
    assert snapshot.job == expected.job
    assert snapshot.fingerprint == expected.fingerprint
    assert snapshot.progress == expected.progress
    assert digest(x=snapshot.shared, y=list(snapshot.contexts)) == digest(
        x=expected.shared, y=list(expected.contexts)
    )
    model = snapshot.shared["tracked"]["model"]
    assert model["weight"] is model["tied"]


def test_the_description_of_a_checkpoint(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    path = CheckpointStore(tmp_path, now=lambda: 1234.5).save(snapshot_at(20))
    description = describe(path)
    assert (description.progress.step, description.virtual_workers, description.created) == (20, 2, 1234.5)
    assert description.size == sum((path / name).stat().st_size for name in FILES)
    assert [(spec.name, spec.shape, spec.size) for spec in description.shared] == [
        ("tracked.model.weight", [2, 3], 24)
    ]


def test_old_ones_are_removed(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        store.save(snapshot_at(step))
    assert sorted(os.listdir(tmp_path)) == ["step-00000030", "step-00000040"]
    CheckpointStore(tmp_path, keep=1).save(snapshot_at(50))
    assert sorted(os.listdir(tmp_path)) == ["step-00000050"]


def test_newer_ones_and_strange_things_are_left_alone(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    CheckpointStore(tmp_path).save(snapshot_at(90))
    strange = [".writing", ".writing-notes", "best", "run.json", "step-1", "step-00000001.bak"]
    for name in strange:
        (tmp_path / name).mkdir()
    for step in (10, 20):
        store.save(snapshot_at(step))
    assert sorted(os.listdir(tmp_path)) == sorted([*strange, "step-00000020", "step-00000090"])


def test_what_can_be_read_by_the_safetensors_package(newest: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(newest / SHARED)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "tracked.model.weight": [[20.0] * 3] * 2
    }


def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    with pytest.raises(UsageError, match=r"'state\.f' in the state is a function"):
        CheckpointStore(tmp_path / "new").save(replace(snapshot_at(10), shared={"state": {"f": find}}))
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_a_place_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a directory"):
        find(tmp_path / "file")
    assert find(tmp_path / "missing") == Found()


def test_one_whose_successor_never_came_is_found_and_put_back(newest: Path, snapshot_at: SnapshotAt) -> None:
    newest.rename(aside := newest.with_name("step-00000020.replaced"))
    assert find(newest.parent).path == aside
    CheckpointStore(newest.parent, keep=2).save(snapshot_at(30))
    assert sorted(os.listdir(newest.parent)) == ["step-00000020", "step-00000030"]
    assert verify(newest) == []


def test_saving_a_step_again_replaces_it(newest: Path, snapshot_at: SnapshotAt) -> None:
    CheckpointStore(newest.parent).save(replace(snapshot_at(20), progress=Progress(step=20, epoch=7)))
    assert sorted(os.listdir(newest.parent)) == ["step-00000010", "step-00000020"]
    assert load(newest).progress.epoch == 7


def test_the_format_of_tensor_files_does_not_change(newest: Path) -> None:
    """Reading compares headers with what would be written now: a change would make old checkpoints unreadable."""
    header = (
        '{"__metadata__":{"format":"pt"},'
        '"tracked.model.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    )
    padded = header + " " * (-len(header) % 8)
    elements = struct.pack("<6f", *[20.0] * 6)
    assert (newest / SHARED).read_bytes() == struct.pack("<Q", len(padded)) + padded.encode() + elements

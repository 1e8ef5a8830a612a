"""Reads and checks a single checkpoint.

Anything wrong with one raises DamagedCheckpoint with the reason; only MemoryError gets through. Links are not followed, and
only regular files are opened, so a directory from an untrusted source can be read safely.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from gyrostat.core.checkpoint_names import NAME
from gyrostat.core.errors import CheckpointError, DamagedCheckpoint
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import tensorfile
from gyrostat.engine.checkpoint.manifest import CONTEXTS, MANIFEST, SHARED, FileRecord, Manifest, from_bytes
from gyrostat.engine.checkpoint.snapshot import JobSnapshot
from gyrostat.engine.state.statetree import MalformedState, Skeleton, TensorSpec, unflatten

_MANIFEST_LIMIT = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Description:
    """The manifest of a checkpoint, for display; its tensors were not read."""

    path: Path
    progress: Progress
    job: dict[str, Any]
    fingerprint: dict[str, str]
    virtual_workers: int | None
    """None if it was imported."""
    created: float
    gyrostat: str
    torch: str
    size: int
    """Bytes of all files."""
    shared: list[TensorSpec]
    contexts: list[TensorSpec]


def load(path: Path) -> JobSnapshot:
    """The whole checkpoint. Raises DamagedCheckpoint if anything is not as it was written."""
    return load_contents(path, read_manifest(path))


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint; empty if it is complete."""
    try:
        load(path)
    except CheckpointError as error:
        return [str(error)]
    return []


def describe(path: Path) -> Description:
    """The manifest of a checkpoint. Raises DamagedCheckpoint if the manifest is damaged."""
    manifest = read_manifest(path)
    job = job_of(path, manifest)
    contexts = manifest.contexts.tree
    files = manifest.shared_file.size + manifest.contexts_file.size
    return Description(
        path=path,
        progress=manifest.progress,
        job=job,
        fingerprint=manifest.fingerprint,
        virtual_workers=len(contexts) or None,
        created=manifest.created,
        gyrostat=manifest.gyrostat,
        torch=manifest.torch,
        size=files + (path / MANIFEST).stat().st_size,
        shared=manifest.shared.tensors,
        contexts=manifest.contexts.tensors,
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest alone, checked."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise DamagedCheckpoint("it is not a directory")
        with _open_regular(path / MANIFEST) as file:
            if os.fstat(file.fileno()).st_size > _MANIFEST_LIMIT:
                raise DamagedCheckpoint(
                    f"{MANIFEST} is larger than {_MANIFEST_LIMIT} bytes, the limit of a manifest"
                )
            manifest = from_bytes(file.readall())
        if (name := NAME.fullmatch(path.name)) and int(name[1]) != manifest.progress.step:
            raise DamagedCheckpoint(f"it was renamed: its manifest says step {manifest.progress.step}")
        if not isinstance(manifest.contexts.tree, list):
            raise DamagedCheckpoint("its contexts are not a list")
    except (DamagedCheckpoint, OSError) as error:
        raise damaged(path, error) from None
    return manifest


def load_contents(path: Path, manifest: Manifest) -> JobSnapshot:
    """The whole checkpoint, whose manifest was read before."""
    return JobSnapshot(
        job=job_of(path, manifest),
        fingerprint=manifest.fingerprint,
        progress=manifest.progress,
        shared=_read_tree(path / SHARED, manifest.shared, manifest.shared_file),
        contexts=_read_tree(path / CONTEXTS, manifest.contexts, manifest.contexts_file),
    )


def job_of(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The identity of the job that wrote it."""
    try:
        job = unflatten(manifest.job, [])
    except MalformedState as error:
        raise damaged(path, error) from None
    if not isinstance(job, dict):
        raise damaged(path, f"its job is {job!r}")
    return job


def damaged(path: Path, reason: object) -> DamagedCheckpoint:
    if isinstance(reason, OSError):
        reason = f"{Path(reason.filename or '').name} cannot be read: {reason.strerror}".lstrip()
    return DamagedCheckpoint(f"checkpoint {path} is damaged: {reason}")


def _read_tree(path: Path, skeleton: Skeleton, record: FileRecord) -> Any:
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                raise DamagedCheckpoint(f"it is {size} bytes long instead of {record.size}")
            return unflatten(skeleton, tensorfile.read(file, skeleton.tensors, record))
    except (DamagedCheckpoint, MalformedState) as error:
        raise damaged(path.parent, f"{path.name}: {error}") from None
    except OSError as error:
        raise damaged(path.parent, error) from None


def _open_regular(path: Path) -> FileIO:
    # O_NOFOLLOW: no links. O_NONBLOCK: do not wait for the other end of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(f"{path.name} is not a regular file")
    return FileIO(descriptor)

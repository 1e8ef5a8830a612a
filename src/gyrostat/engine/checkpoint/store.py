"""The checkpoints of a job: writes one so that an interruption does no harm, and finds the newest that can be used.

An interruption at any of these steps leaves the checkpoints that existed before:

    1. flatten the state; nothing is written if it cannot be stored
    2. remove what interrupted writes have left
    3. write and sync three files in a directory of another name
    4. rename it into place; the checkpoint exists from now on
    5. remove old ones beyond the number to keep

An existing checkpoint of the same step is renamed to `step-….replaced` between two renames; it is found under that name too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gyrostat import __version__
from gyrostat.core.checkpoint_names import NAME, list_checkpoints
from gyrostat.core.errors import CheckpointError, ForeignCheckpoint, OtherFingerprint, UsageError
from gyrostat.engine.checkpoint import tensorfile
from gyrostat.engine.checkpoint.disk import Disk, make_directories, remove, sync_directory, write_file
from gyrostat.engine.checkpoint.manifest import CONTEXTS, FORMAT, MANIFEST, SHARED, Manifest, to_bytes
from gyrostat.engine.checkpoint.read import job_of, load_contents, read_manifest
from gyrostat.engine.checkpoint.snapshot import FlatSnapshot, Found, JobSnapshot, flatten_snapshot
from gyrostat.engine.state.statetree import Flat

logger = logging.getLogger(__name__)

_UNFINISHED = re.compile(r"\.(writing|removing)-step-\d{8,18}(\.replaced)?-[0-9a-f]{8}")


class CheckpointStore:
    """A directory of checkpoints of one job."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        disk: Disk | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        if keep < 1:
            raise UsageError(f"the number of checkpoints to keep is {keep}; it must be at least 1")
        self.directory = Path(directory)
        self.keep = keep
        self._disk = disk or Disk()
        self._now = now

    # Writing.

    def save(self, snapshot: JobSnapshot) -> Path:
        """Write a checkpoint; when this returns, it survives a power cut."""
        return self.write(flatten_snapshot(snapshot))

    def write(self, snapshot: FlatSnapshot, confirm: Callable[[], None] = lambda: None) -> Path:
        """As `save`, of a flattened snapshot. `confirm` is called before it is put in place; if it raises, nothing is."""
        final = self.directory / f"step-{snapshot.progress.step:08d}"
        beside = self._beside("writing", final)
        try:
            make_directories(self._disk, self.directory)
            self._clear_leftovers()
            self._disk.make_directory(beside)
            with _held(beside):
                self._write_files(beside, snapshot)
                confirm()
                self._put_in_place(beside, final)
        except BaseException as error:
            self._try_remove(beside)
            if isinstance(error, OSError):
                raise _write_error(final, error) from error
            raise
        logger.info("checkpoint %s is in place", final, extra={"step": snapshot.progress.step})
        self._remove_old(snapshot.progress.step)
        return final

    def set_aside(self) -> Path | None:
        """Move all checkpoints into a subdirectory `earlier-1`, `earlier-2`, …, for a job that starts from scratch."""
        found = list_checkpoints(self.directory)
        if not found:
            return None
        number = 1
        while os.path.lexists(self.directory / f"earlier-{number}"):
            number += 1
        earlier = self.directory / f"earlier-{number}"
        try:
            self._disk.make_directory(earlier)
            for path in found:
                self._disk.rename(path, earlier / path.name)
            sync_directory(self._disk, self.directory)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints in {self.directory} cannot be set aside: {error.strerror}"
            ) from error
        return earlier

    def _write_files(self, path: Path, snapshot: FlatSnapshot) -> None:
        shared_file = write_file(self._disk, path / SHARED, _contents(snapshot.shared))
        contexts_file = write_file(self._disk, path / CONTEXTS, _contents(snapshot.contexts))
        manifest = Manifest(
            format=FORMAT,
            gyrostat=__version__,
            torch=str(torch.__version__),
            created=self._now(),
            progress=snapshot.progress,
            job=snapshot.job,
            fingerprint={key: str(value) for key, value in snapshot.fingerprint.items()},
            shared_file=shared_file,
            contexts_file=contexts_file,
            shared=snapshot.shared.skeleton,
            contexts=snapshot.contexts.skeleton,
        )
        write_file(self._disk, path / MANIFEST, [to_bytes(manifest)])
        sync_directory(self._disk, path)

    def _put_in_place(self, beside: Path, final: Path) -> None:
        aside = final.with_name(f"{final.name}.replaced")
        if os.path.lexists(final):
            self._disk.rename(final, aside)
        self._disk.rename(beside, final)
        sync_directory(self._disk, self.directory)

    def _remove_old(self, written: int) -> None:
        """Remove all but the newest `keep` up to the one just written, and the one that it has replaced."""
        kept: set[int] = set()
        for path in list_checkpoints(self.directory):
            step = _step(path)
            if step > written:
                continue
            if step in kept or len(kept) >= self.keep:
                logger.debug("removing old checkpoint %s", path, extra={"step": step})
                self._try_remove(path)
            kept.add(step)

    def _clear_leftovers(self) -> None:
        """Remove what interrupted writes and removals have left. A replaced checkpoint without a successor is put back."""
        for entry in sorted(self.directory.iterdir()):
            name = NAME.fullmatch(entry.name)
            if name and name[2]:
                successor = self.directory / f"step-{name[1]}"
                if os.path.lexists(successor):
                    self._try_remove(entry)
                else:
                    self._disk.rename(entry, successor)
            elif _UNFINISHED.fullmatch(entry.name) and _abandoned(entry):
                self._try_remove(entry)

    def _try_remove(self, path: Path) -> None:
        """Remove if possible. A checkpoint is renamed first, so that none is found half removed."""
        with contextlib.suppress(OSError):
            if NAME.fullmatch(path.name):
                hidden = self._beside("removing", path)
                self._disk.rename(path, hidden)
                path = hidden
            remove(self._disk, path)

    def _beside(self, doing: str, path: Path) -> Path:
        return path.with_name(f".{doing}-{path.name}-{secrets.token_hex(4)}")

    # Finding.

    def find(self, job: Mapping[str, Any], fingerprint: Mapping[str, str]) -> Found:
        """The newest that is complete, of this job, and of this fingerprint. Damage does not raise."""
        errors: list[CheckpointError] = []
        for path in list_checkpoints(self.directory):
            try:
                manifest = read_manifest(path)
                partial = not manifest.contexts.tree  # imported: only some of the state
                if differences := _differences(job_of(path, manifest), job, partial):
                    raise ForeignCheckpoint(f"checkpoint {path} is of another job: {differences}")
                if differences := _differences(manifest.fingerprint, fingerprint, partial):
                    raise OtherFingerprint(
                        f"checkpoint {path} has another fingerprint, so bits would differ: {differences}"
                    )
                return Found(path=path, snapshot=load_contents(path, manifest), errors=errors)
            except CheckpointError as error:
                errors.append(error)
        return Found(errors=errors)


def _contents(flat: Flat) -> Iterator[bytes | memoryview]:
    return tensorfile.chunks(flat.skeleton.tensors, [tensor for _, tensor in flat.tensors])


def _step(path: Path) -> int:
    name = NAME.fullmatch(path.name)
    assert name is not None
    return int(name[1])


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], partial: bool) -> str:
    """What differs, with both values. `partial`: compare only the keys of `there`."""
    keys = [*there, *(key for key in here if key not in there and not partial)]
    return "; ".join(
        f"{key} is {_shown(there, key)} there and {_shown(here, key)} here"
        for key in keys
        if key not in there or key not in here or there[key] != here[key]
    )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Lock a directory while it is written, so that no other writer removes it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _abandoned(directory: Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return True


def _write_error(final: Path, error: OSError) -> CheckpointError:
    advice = "check the directory given as --checkpoint-dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space, or keep fewer checkpoints"
    reason = error.strerror or str(error)
    return CheckpointError(
        f"checkpoint {final} could not be written: {reason}; earlier ones are as they were; {advice}"
    )

"""Checkpoints on disk: a manifest in JSON that names one safetensors file per slot, all in one directory.

A checkpoint is valid once its manifest exists, which is written last. The number of servers is not part of it: any number can
load the files.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gyrostat.core.errors import DamagedCheckpoint, ForeignCheckpoint, GyrostatError
from gyrostat.core.files import write_atomically
from gyrostat.ps.protocol.checkpoint import PsCheckpoint
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.store.spec import StoreSpec

FORMAT = 1
_NAME = re.compile(r"servers-(\d{8})\.json")
_SLOT_FILE = re.compile(r"(\d{8})-slot-\d{4}-[\w.-]+\.safetensors")


class PsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint of a job with parameter servers consists of."""

    format: int
    spec: StoreSpec
    data: DataSpec
    checkpoint: PsCheckpoint


@dataclass(frozen=True)
class FoundCheckpoint:
    """What a directory has to begin from."""

    manifest: PsManifest | None
    path: Path | None
    refused: tuple[str, ...]
    """Why newer ones were not taken."""


class CheckpointFiles:
    """The checkpoints in a directory."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self._keep = directory, keep

    def write(self, manifest: PsManifest) -> None:
        """Make a checkpoint valid, and delete those that are not kept."""
        write_atomically(self.path(manifest.checkpoint.number), msgspec.json.encode(manifest))
        self._prune()

    def newest(self) -> FoundCheckpoint:
        """The newest one that can be read; damaged ones are refused, with the reason."""
        refused: list[str] = []
        for number in reversed(self._numbers()):
            path = self.path(number)
            try:
                return FoundCheckpoint(self._read(path), path, tuple(refused))
            except DamagedCheckpoint as error:
                refused.append(str(error))
        return FoundCheckpoint(None, None, tuple(refused))

    def path(self, number: int) -> Path:
        return self.directory / f"servers-{number:08d}.json"

    def _read(self, path: Path) -> PsManifest:
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=PsManifest)
        except (OSError, msgspec.DecodeError, GyrostatError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
        if manifest.format != FORMAT:
            raise DamagedCheckpoint(f"{path} has format {manifest.format}; this version reads {FORMAT}")
        files = manifest.checkpoint.files
        if sorted(files) != list(range(manifest.spec.slots)):
            raise DamagedCheckpoint(f"{path} names files of {len(files)} slots of {manifest.spec.slots}")
        for slot, file in files.items():
            if not _SLOT_FILE.fullmatch(file):
                raise DamagedCheckpoint(f"{path} names {file!r}, which is no file of a slot")
            if not (self.directory / file).is_file():
                raise DamagedCheckpoint(f"{path} names {file} for slot {slot}, which does not exist")
        return manifest

    def highest(self) -> int:
        """The highest number in use, also of files that no manifest names: new files must not overwrite them."""
        found = [
            int(match[1]) for path in self.directory.iterdir() if (match := _SLOT_FILE.fullmatch(path.name))
        ]
        return max([*found, *self._numbers()], default=0)

    def _numbers(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _prune(self) -> None:
        numbers = self._numbers()
        oldest = numbers[-self._keep :][0]
        for number in numbers[: -self._keep]:
            self.path(number).unlink(missing_ok=True)
        for path in self.directory.iterdir():
            match = _SLOT_FILE.fullmatch(path.name)
            if match and int(match[1]) < oldest:
                with contextlib.suppress(OSError):
                    path.unlink()


def slot_file_name(checkpoint: int, slot: int, writer: str) -> str:
    """`writer`: a name that no other process has that may write the same slot."""
    return f"{checkpoint:08d}-slot-{slot:04d}-{writer.replace('/', '_')}.safetensors"


def check_same_job(manifest: PsManifest, spec: StoreSpec, data: DataSpec, directory: Path) -> None:
    """Raise `ForeignCheckpoint` if the checkpoint is of another job, with what differs."""
    for name, saved, mine in (("servers", manifest.spec, spec), ("data", manifest.data, data)):
        if saved != mine:
            raise ForeignCheckpoint(
                f"the checkpoint in {directory} is of another job: {_difference(name, saved, mine)}; use the same script and "
                "data, or another directory"
            )


def _difference(name: str, saved: Any, mine: Any) -> str:
    for field in saved.__struct_fields__:
        before, now = getattr(saved, field), getattr(mine, field)
        if before != now:
            return f"{field} of its {name} was {before!r}, and is {now!r} here"
    return name

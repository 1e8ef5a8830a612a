"""The order of updates, written down while an asynchronous job runs, so that it can be repeated in one process.

Every update carries its origin: which computation it comes from, and how many updates each slot had applied at each of its
pulls. A server writes a line for every update that its slots accept, and one when it becomes the owner of a slot; lines
are in the system's hands before the update is acknowledged, so that they outlive the process. `merge_records` puts the files
of all servers together. What was rolled back is part of it: a slot that was saved late may have updates that were computed
with what another slot, which was saved early, has lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import msgspec

from gyrostat.core.errors import DamagedCheckpoint, UsageError
from gyrostat.core.files import write_atomically
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.protocol.record_lines import RecordLine, SlotOwned, UpdateOrigin, line_of
from gyrostat.ps.store.spec import StoreSpec

FORMAT = 1
_PREFIX = "updates-of-"


class UpdateRecorder:
    """Writes one server's file."""

    def __init__(self, directory: Path, server: str) -> None:
        name = server.replace("/", "-")
        self._file: IO[bytes] = (directory / f"{_PREFIX}{name}.jsonl").open("ab", buffering=0)

    def write(self, line: RecordLine) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def clear_records(directory: Path) -> None:
    """Remove the files of an earlier run."""
    for path in directory.glob(f"{_PREFIX}*.jsonl"):
        path.unlink()


class Computation(msgspec.Struct, frozen=True):
    """A batch that some worker has computed."""

    epoch: int
    batch: int
    pulls: tuple[bytes, ...]


class UpdateLine(msgspec.Struct, frozen=True):
    """The updates of a slot under one owner."""

    slot: int
    name: int
    """`line_of`. Later lines of a slot have larger names."""
    start: int
    """The version at which it begins."""
    updates: tuple[int, ...]
    """Numbers of computations."""


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    format: int
    digest: str
    """Of the parameters at the end."""
    spec: StoreSpec
    data: DataSpec
    computations: tuple[Computation, ...]
    lines: tuple[UpdateLine, ...]

    def write(self, path: Path) -> None:
        write_atomically(path, msgspec.json.encode(self))


def merge_records(directory: Path, *, spec: StoreSpec, data: DataSpec, digest: str) -> UpdateRecord:
    """What the files of all servers say."""
    numbers: dict[str, int] = {}
    computations: list[Computation] = []
    lines: list[tuple[SlotOwned, list[int]]] = []
    for path in sorted(directory.glob(f"{_PREFIX}*.jsonl")):
        here: dict[int, list[int]] = {}
        for line in _lines(path):
            if isinstance(line, SlotOwned):
                here[line.slot] = []
                lines.append((line, here[line.slot]))
                continue
            origin = msgspec.msgpack.decode(line.origin, type=UpdateOrigin)
            for slot in line.slots:
                if slot in here:  # else it is the owner's mirror
                    if origin.computation not in numbers:
                        numbers[origin.computation] = len(computations)
                        computations.append(Computation(line.epoch, line.batch, origin.pulls))
                    here[slot].append(numbers[origin.computation])
    found = [
        UpdateLine(owned.slot, line_of(owned.term, owned.number), owned.version, tuple(updates))
        for owned, updates in lines
    ]
    return UpdateRecord(
        format=FORMAT,
        digest=digest,
        spec=spec,
        data=data,
        computations=tuple(computations),
        lines=tuple(sorted(found, key=lambda line: (line.slot, line.name))),
    )


def read_record(path: Path) -> UpdateRecord:
    """Raises `UsageError` if it is none."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=UpdateRecord)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not a record of updates: {error}; give a file of `gyrostat run --record FILE`"
        ) from error
    if record.format != FORMAT:
        raise UsageError(f"{path} has format {record.format}; this version reads format {FORMAT}")
    return record


def _lines(path: Path) -> Iterable[RecordLine]:
    """A server that was killed may have left the last line incomplete; it has not acknowledged that update."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(RecordLine)
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            if number < len(lines) - 1:
                raise DamagedCheckpoint(f"line {number + 1} of {path} cannot be read: {error}") from error

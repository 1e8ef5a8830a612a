"""The order of updates, written down while an asynchronous job runs, so that it can be repeated in one process.

Every update carries its origin: which computation it comes from, and how many updates each slot had applied at each of its
pulls. A server writes a line for every update that its slots accept, and one when it becomes the owner of a slot; lines
are in the system's hands before the update is acknowledged, so that they outlive the process. `merge_records` puts the files
of all servers together: of each slot, the updates that are in it at the end. What was rolled back, or accepted by a
server that was given up, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from gyrostat.core.errors import DamagedCheckpoint, UsageError
from gyrostat.core.files import write_atomically
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.protocol.record_lines import RecordLine, SlotOwned, UpdateAccepted, UpdateOrigin
from gyrostat.ps.store.spec import StoreSpec

FORMAT = 1
_PREFIX = "updates-of-"


class UpdateRecorder:
    """Writes one server's file."""

    def __init__(self, directory: Path, server: str) -> None:
        self._file: IO[bytes] = (directory / f"{_PREFIX}{server}.jsonl").open("ab", buffering=0)

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


class AsyncRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    format: int
    digest: str
    """Of the parameters at the end."""
    spec: StoreSpec
    data: DataSpec
    computations: tuple[Computation, ...]
    history: tuple[tuple[int, ...], ...]
    """By slot: the numbers of the computations whose updates it has taken, in order."""

    def write(self, path: Path) -> None:
        write_atomically(path, msgspec.json.encode(self))


@dataclass
class _Owner:
    """A line of updates of one slot, from the instant at which a server became its owner."""

    term: int
    number: int
    start: int
    updates: list[tuple[int, UpdateAccepted]]


def merge_records(directory: Path, *, spec: StoreSpec, data: DataSpec, digest: str) -> AsyncRecord:
    """What the files of all servers say."""
    owners: list[list[_Owner]] = [[] for _ in range(spec.slots)]
    for path in sorted(directory.glob(f"{_PREFIX}*.jsonl")):
        here: dict[int, _Owner] = {}
        for line in _lines(path):
            if isinstance(line, SlotOwned):
                here[line.slot] = _Owner(line.term, line.number, line.version, [])
                owners[line.slot].append(here[line.slot])
            else:
                for slot, version in line.slots.items():
                    if slot in here:
                        here[slot].updates.append((version, line))
    numbers: dict[str, int] = {}
    computations: list[Computation] = []
    history = []
    for each in owners:
        taken = []
        for update in _valid(each):
            origin = msgspec.msgpack.decode(update.origin, type=UpdateOrigin)
            if origin.computation not in numbers:
                numbers[origin.computation] = len(computations)
                computations.append(Computation(update.epoch, update.batch, origin.pulls))
            taken.append(numbers[origin.computation])
        history.append(tuple(taken))
    return AsyncRecord(
        format=FORMAT,
        digest=digest,
        spec=spec,
        data=data,
        computations=tuple(computations),
        history=tuple(history),
    )


def read_record(path: Path) -> AsyncRecord:
    """Raises `UsageError` if it is none."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=AsyncRecord)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not a record of updates: {error}; give a file of `gyrostat run --record FILE`"
        ) from error
    if record.format != FORMAT:
        raise UsageError(f"{path} has format {record.format}; this version reads format {FORMAT}")
    return record


def _valid(owners: list[_Owner]) -> list[UpdateAccepted]:
    """The updates of one slot that are in it at the end: each owner begins where the one before it was when it took over."""
    kept: list[tuple[int, UpdateAccepted]] = []
    for owner in sorted(owners, key=lambda each: (each.term, each.number)):
        if owner.start > 0 and not kept and not any(each.start == 0 for each in owners):
            raise UsageError(
                f"the record begins in the middle: a slot had applied {owner.start} updates already. Record a run from its "
                "start (--no-resume)"
            )
        kept = [(version, update) for version, update in kept if version < owner.start]
        kept += owner.updates
    return [update for _, update in kept]


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

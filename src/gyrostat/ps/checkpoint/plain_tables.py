"""Tables and dense parameters of a checkpoint as one plain safetensors file, and back.

    TABLE.ids     int64, ascending          MODULE.PARAMETER     float32, in its shape
    TABLE.rows    float32, one row per id

Its metadata has the job's description (`gyrostat`), from which a checkpoint can be made again: the values are the file's, and
optimizers, bitmaps and shard queues begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from gyrostat.core.errors import DamagedCheckpoint, MalformedState, UsageError
from gyrostat.ps.checkpoint.checkpoint_files import FORMAT, CheckpointFiles, PsManifest, slot_file_name
from gyrostat.ps.checkpoint.slot_files import read_slot, write_slot
from gyrostat.ps.protocol.checkpoint import PsCheckpoint
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.store.hashing import ids_of, keys_of, slot_bounds
from gyrostat.ps.store.slot_state import SlotState
from gyrostat.ps.store.slot_store import SlotStore
from gyrostat.ps.store.spec import DenseSpec, StoreSpec

_METADATA = "gyrostat"
Plain = dict[str, NDArray[Any]]


class _Description(msgspec.Struct, frozen=True):
    spec: StoreSpec
    data: DataSpec


def holds_servers(directory: Path) -> bool:
    """Whether there are checkpoints of a job with servers."""
    return directory.is_dir() and any(directory.glob("servers-*.json"))


def describes_servers(file: Path) -> bool:
    """Whether this is a file of `export_tables`."""
    if file.suffix != ".safetensors" or not file.is_file():
        return False
    return _METADATA in _open_metadata(file)


def export_tables(directory: Path, output: Path) -> tuple[Path, Plain]:
    """Write the newest checkpoint of a directory as a plain file. Returns its manifest and the arrays."""
    found = CheckpointFiles(directory, keep=1).newest()
    if found.manifest is None or found.path is None:
        raise DamagedCheckpoint(f"no checkpoint in {directory} can be read: {'; '.join(found.refused)}")
    manifest = found.manifest
    states = [read_slot(directory / manifest.checkpoint.files[slot]) for slot in range(manifest.spec.slots)]
    plain = plain_of(manifest.spec, states)
    description = msgspec.json.encode(_Description(manifest.spec, manifest.data)).decode()
    safetensors.numpy.save_file(plain, output, {_METADATA: description})
    return found.path, plain


def plain_of(spec: StoreSpec, states: list[SlotState]) -> Plain:
    """The states of all slots, in their order."""
    plain: Plain = {}
    for table in spec.tables:
        columns = {
            column: np.concatenate([state.arrays[f"table.{table.name}.{column}"] for state in states])
            for column in ("keys", "rows")
        }
        ids = ids_of(columns["keys"], table.name)
        order = np.argsort(ids)
        plain[f"{table.name}.ids"] = ids[order]
        plain[f"{table.name}.rows"] = columns["rows"][order]
    for dense in spec.dense:
        pieces = [state.arrays.get(f"dense.{dense.name}.values") for state in states]
        if any(piece is None for piece in pieces):
            raise DamagedCheckpoint(
                f"{dense.name!r} has no values yet: the checkpoint is older than the first batch"
            )
        flat = np.concatenate([piece for piece in pieces if piece is not None])[: dense.size]
        start = 0
        for name, shape in _parameters(dense):
            plain[f"{dense.name}.{name}"] = flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
    return plain


def import_tables(file: Path, directory: Path) -> PsManifest:
    """Write a checkpoint that a job begins from, with the values of a file of `export_tables`."""
    try:
        description = msgspec.json.decode(_open_metadata(file)[_METADATA], type=_Description)
    except (KeyError, msgspec.DecodeError) as error:
        raise UsageError(
            f"{file} does not describe a job with servers; give a file of `gyrostat checkpoint export`"
        ) from error
    spec, data = description.spec, description.data
    states = states_of(spec, safetensors.numpy.load_file(file), file)
    files = {}
    for state in states:
        files[state.slot] = slot_file_name(1, state.slot, "import")
        write_slot(directory / files[state.slot], state)
    checkpoint = PsCheckpoint(1, 0, data.queues(inf).to_state(), files)
    manifest = PsManifest(format=FORMAT, spec=spec, data=data, checkpoint=checkpoint)
    CheckpointFiles(directory, keep=1).write(manifest)
    return manifest


def states_of(spec: StoreSpec, plain: Mapping[str, NDArray[Any]], file: Path) -> list[SlotState]:
    """Slots that have applied nothing, with these values."""
    empty = SlotStore(spec)
    empty.own(range(spec.slots))
    arrays: list[Plain] = [dict(empty.to_state(slot).arrays) for slot in range(spec.slots)]
    for table in spec.tables:
        ids, rows = (
            _taken(plain, f"{table.name}.{column}", dtype, file)
            for column, dtype in (("ids", np.int64), ("rows", np.float32))
        )
        if rows.shape != (len(ids), table.width) or len(np.unique(ids)) != len(ids):
            raise UsageError(
                f"{file}: table {table.name!r} has {ids.shape} ids and {rows.shape} rows; each id needs one row of "
                f"{table.width}"
            )
        keys = keys_of(ids, table.name)
        order = np.argsort(keys)
        keys, rows = keys[order], rows[order]
        bounds = slot_bounds(keys, spec.slots)
        for slot in range(spec.slots):
            mine = slice(bounds[slot], bounds[slot + 1])
            columns = {"keys": keys[mine], "rows": rows[mine], "state": table.optimizer.begin(rows[mine])}
            if table.expire_after:
                columns["used"] = np.zeros(len(keys[mine]), np.int64)
            arrays[slot] |= {f"table.{table.name}.{name}": each for name, each in columns.items()}
    for dense in spec.dense:
        parts = []
        for name, shape in _parameters(dense):
            part = _taken(plain, f"{dense.name}.{name}", np.float32, file)
            if part.shape != shape:
                raise UsageError(f"{file}: {dense.name}.{name} has shape {part.shape}, not {shape}")
            parts.append(part.reshape(-1))
        padded = np.zeros(dense.piece(spec.slots) * spec.slots, np.float32)
        padded[: dense.size] = np.concatenate(parts)
        pieces = padded.reshape(spec.slots, -1)
        state = dense.optimizer.begin(pieces)
        for slot in range(spec.slots):
            arrays[slot] |= {
                f"dense.{dense.name}.values": pieces[slot],
                f"dense.{dense.name}.state": state[slot],
            }
    states = [SlotState(slot, spec.slots, 0, 0, each) for slot, each in enumerate(arrays)]
    check = SlotStore(spec)
    for each in states:
        check.restore(each)
    return states


def _parameters(dense: DenseSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return dense.parameters or (("values", (dense.size,)),)


def _taken(plain: Mapping[str, NDArray[Any]], name: str, dtype: Any, file: Path) -> NDArray[Any]:
    if name not in plain:
        raise UsageError(f"{file} has no {name!r}; it has {', '.join(sorted(plain)) or 'nothing'}")
    if plain[name].dtype != dtype:
        raise UsageError(f"{file}: {name} is {plain[name].dtype}, not {np.dtype(dtype)}")
    return plain[name]


def _open_metadata(file: Path) -> dict[str, str]:
    try:
        with safetensors.safe_open(file, framework="np") as opened:
            return dict(opened.metadata() or {})
    except (OSError, safetensors.SafetensorError) as error:
        raise MalformedState(f"{file} cannot be read as safetensors: {error}") from error

"""Imports a file of another program as a checkpoint, and exports state_dicts of a checkpoint as plain files.

This is the only module that reads a pickle: a file of `torch.save`, at the user's explicit request, with torch's
`weights_only`, which makes only tensors and plain values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from gyrostat.core.errors import UsageError
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint.snapshot import JobSnapshot

_USUAL = {
    "model": ("model", "model_state_dict", "state_dict", "model_state", "net", "module"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_state", "optim"),
    "schedule": (
        "schedule",
        "scheduler",
        "lr_scheduler",
        "scheduler_state_dict",
        "lr_scheduler_state_dict",
        "scheduler_state",
    ),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler"),
}
"""The names that training scripts use, by the name under which gyrostat's examples track the object."""


@dataclass(frozen=True, kw_only=True)
class Picked:
    """The state dicts chosen from a file, by the name to track them under, and the entries that were left out."""

    states: dict[str, Any]
    left_out: list[str]


def read_plain(path: Path) -> Any:
    """The content of a .safetensors file, or of one of `torch.save`."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # torch's own text advises to run the file's code
        raise UsageError(
            f"{path} cannot be imported: it must be a safetensors file, or one of torch.save that holds nothing but tensors "
            "and plain values, such as {'model': model.state_dict(), …}; a whole pickled model cannot be imported"
        ) from error


def pick(loaded: Any, wanted: Mapping[str, str], *, keep_prefix: bool = False) -> Picked:
    """Choose state dicts: those of `wanted` (name → entry), or, if that is empty, those with a usual name.

    The prefix `module.` that DistributedDataParallel puts before every name is taken off.
    """
    if not isinstance(loaded, Mapping):
        raise UsageError(f"the file holds a {type(loaded).__name__}, not a state_dict or a dict of them")
    if not loaded:
        raise UsageError("the file is empty; give one that holds a state_dict, or a dict of them")
    entries = list(map(str, loaded))
    if wanted:
        chosen = {name: _entry(loaded, entry) for name, entry in wanted.items()}
        left_out = [entry for entry in entries if entry not in wanted.values()]
    elif all(isinstance(value, torch.Tensor) for value in loaded.values()):
        chosen, left_out = {"model": loaded}, []
    else:
        usual = {name: _first(loaded, known) for name, known in _USUAL.items()}
        chosen = {name: loaded[entry] for name, entry in usual.items() if entry is not None}
        left_out = [entry for entry in entries if entry not in usual.values()]
    if not chosen:
        raise UsageError(
            f"the file has no entry with a usual name, only {', '.join(entries)}; name one, as in --map model={entries[0]}"
        )
    return Picked(
        states={name: state if keep_prefix else _without_prefix(state) for name, state in chosen.items()},
        left_out=left_out,
    )


def imported(states: Mapping[str, Any], *, step: int, epoch: int) -> JobSnapshot:
    """A snapshot of these states at the start of an epoch; its contexts begin afresh."""
    return JobSnapshot(
        job={},
        fingerprint={},
        progress=Progress(step=step, epoch=epoch, epochs_run=epoch + 1),
        shared={"tracked": dict(states)},
        contexts=[],
    )


def state_dict_of(snapshot: JobSnapshot, name: str) -> dict[str, Any]:
    """The state_dict of the object tracked under this name."""
    tracked: dict[str, Any] = snapshot.shared["tracked"]
    if name not in tracked:
        raise UsageError(
            f"nothing is tracked as {name!r} in this checkpoint; use one of {', '.join(sorted(tracked))}"
        )
    return dict(tracked[name])


def write_plain(state: dict[str, Any], path: Path) -> None:
    """A state_dict as a file for other programs: .safetensors, or for torch.load .pt or .pth."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise UsageError(f"{path.name} has no known ending; use .safetensors, .pt or .pth")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".safetensors":
            save_file(_separate_tensors(state), beside, metadata={"format": "pt"})
        else:
            with beside.open("wb") as file:
                torch.save(state, file)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _entry(loaded: Mapping[str, Any], entry: str) -> Any:
    """`a.b` is the entry of that name, or else the entry b of the entry a. An empty name is the whole file."""
    value: Any = loaded
    parts = [entry] if entry in loaded else entry.split(".")
    for part in parts if entry else []:
        if not isinstance(value, Mapping) or part not in value:
            raise UsageError(f"the file has no entry {entry!r}; it has {', '.join(map(str, loaded))}")
        value = value[part]
    if not isinstance(value, Mapping):
        raise UsageError(f"the entry {entry!r} is a {type(value).__name__}, not a state_dict")
    return value


def _first(loaded: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(loaded.get(name), Mapping)), None)


def _without_prefix(state: Any) -> Any:
    """Only if every name has it: a module may have a submodule that is called `module`."""
    if state and all(isinstance(key, str) and key.startswith("module.") for key in state):
        consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def _separate_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """safetensors holds only tensors, and no tied ones: each gets memory of its own."""
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name!r} is a {type(value).__name__}, safetensors files hold tensors only; export to .pt"
            )
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}

"""One slot as a safetensors file. It has a name of its own, and counts only when a manifest names it."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from gyrostat.core.errors import MalformedState
from gyrostat.ps.store.slot_state import SlotState, parse_slot_state

_AT_ONCE = 1 << 22


def write_slot(path: Path, state: SlotState) -> None:
    """Write a file, on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for part in state.parts():
            data = part.cast("B")
            for start in range(0, len(data), _AT_ONCE):
                left = data[start : start + _AT_ONCE]
                while len(left):
                    left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def read_slot(path: Path) -> SlotState:
    """A slot whose arrays are views of the file. Raises `MalformedState` or `OSError`."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise MalformedState(f"{path} is empty")
        return parse_slot_state(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))

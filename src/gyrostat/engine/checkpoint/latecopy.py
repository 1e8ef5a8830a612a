"""The part of a checkpoint's copy that is made late: during the forward and backward that follow the boundary.

Under AdamW two thirds of a job's state are momenta, which only the optimizer changes, in its `step`. So

    1. at the boundary each is only recorded, with its version (torch counts in-place changes of a tensor) and a sample
    2. the writer's thread copies them (`complete`), while micro-batches run
    3. before an update training waits for the copy, and helps (`settle`); then it checks versions and samples
    4. if no update comes, the thread checks them before the checkpoint is put in place (`require_exact`)

If a tensor was changed in between, `CopyInvalidated` names it, and the checkpoint is discarded. (The thread checks when
everything has been hashed, written and synced: by then torch has counted a change that it had copied half made.) Replacing
such a tensor, as `optimizer.load_state_dict`, `optimizer.state.clear()` and `tensor.data = …` do, is no change: the copy holds
the memory of the boundary.

`choose` decides which tensors are copied late: large ones in the state of tracked `torch.optim.Optimizer`s, as `state_dict`
returns them, in CPU memory that they share with nothing else in the snapshot. Small ones are copied at the boundary, which
takes no longer than to record them; so are those of an accelerator, because the order on its streams is not under our
control, and all that a script may change at any time: parameters, buffers, gradients, `job.state`.

Torch does not count changes through `tensor.data` or an array of `tensor.numpy()`. Samples detect those, unless a script
changes only a few elements so between a boundary and the next update.

The engine itself changes no optimizer's state in place. Newcomers replay updates by their optimizers' `step`, and write no
checkpoint while they do. Recovery runs micro-batches again, and makes no updates. A resumed job, and a newcomer at the fence,
call `load_state_dict` before a checkpoint is taken. The donor only reads. A worker that leaves, and a job that ends, collect
the writer first. When a script has raised, the process ends only after the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence

import torch

from gyrostat.engine.state.flatcopy import FlatCopy, FlatRow
from gyrostat.engine.state.tensorbytes import byte_row, is_dense

_LARGE = 64 << 10
_SAMPLES = 16
"""Elements of each tensor."""


class CopyInvalidated(Exception):
    """A tensor was changed before it was copied."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.tensor = tensor
        """Its name in the snapshot."""


def choose(rows: Sequence[FlatRow], steady: Iterable[torch.Tensor], tied: Collection[str]) -> list[FlatRow]:
    """The rows that may be copied late. `steady`: only an optimizer's step changes them. `tied`: names of tied tensors."""
    wanted = {id(tensor) for tensor in steady}
    if not wanted:
        return []
    others = {_memory(row.tensor) for row in rows if id(row.tensor) not in wanted}
    return [
        row
        for row in rows
        if id(row.tensor) in wanted
        and row.room.numel() >= _LARGE
        and row.name not in tied
        and _is_plain(row.tensor)
        and _memory(row.tensor) not in others
    ]


class LateCopy:
    """Rows copied by the writer's thread, and by the script's thread while it waits for them."""

    def __init__(self, rows: Sequence[FlatRow]) -> None:
        """Record the rows, at the boundary."""
        held = [FlatRow(row.name, row.tensor.detach(), row.room) for row in rows]
        self._recorded = [(row, _signature(row.tensor)) for row in held]
        self._copying = FlatCopy(held)
        self._check_lock = threading.Lock()
        self._checked = False
        self._changed: str | None = None
        self.waited = 0.0
        """Seconds for which training waited in `settle`."""

    def complete(self) -> None:
        """Return when everything is copied. The writer's thread."""
        self._copying.complete()

    def settle(self) -> None:
        """Return when tensors may change again. The script's thread."""
        since = time.monotonic()
        self._copying.complete()
        self._check()
        self.waited += time.monotonic() - since

    def require_exact(self) -> None:
        """Raise if the copy, which is complete, is not the state of the boundary. The writer's thread."""
        self._check()
        if self._copying.failure is not None:
            raise self._copying.failure
        if self._changed is not None:
            raise CopyInvalidated(self._changed)

    def _check(self) -> None:
        """Compare signatures once, in the thread that comes first: after that training may change the tensors."""
        with self._check_lock:
            if self._checked:
                return
            self._checked = True
            changed = (row.name for row, signature in self._recorded if _signature(row.tensor) != signature)
            self._changed = next(changed, None)
            self._recorded.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    """On the CPU, with a version, and dense."""
    return (
        tensor.device.type == "cpu"
        and not tensor.is_inference()  # it has no version
        and (tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()))
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _signature(tensor: torch.Tensor) -> tuple[int, int, bytes]:
    """Version, address and a sample of a tensor: differs if the tensor has changed, with the exception named above."""
    count = min(tensor.numel(), _SAMPLES)
    sample = tensor.as_strided((count,), (tensor.numel() // count,))  # in any order of its dimensions
    return tensor._version, tensor.data_ptr(), byte_row(sample).numpy().tobytes()

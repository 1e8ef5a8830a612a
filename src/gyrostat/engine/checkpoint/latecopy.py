"""The part of a copy that is made late: behind the forward and backward that follow the boundary.

Under AdamW two thirds of a job's state are momenta, and nobody changes those but the optimizer, in its `step`. So

    1. at the boundary they are only noted, each with its version (torch counts the changes of a tensor in place) and a sample
    2. the writer's thread copies them (`complete`), while micro-batches run
    3. before an update training waits for that, and helps (`settle`); then it looks whether a version or a sample has changed
    4. if no update has come by then, the thread looks, before the checkpoint is put in place (`require_exact`)

Whoever did change one in between has spoiled the copy: `Spoiled` names the tensor, and nothing of it is put in place. (The
thread looks when all has been hashed, written and synced. A change that it had copied half made has been counted by then.)
What replaces such a tensor instead of changing it, as `optimizer.load_state_dict`, `optimizer.state.clear()` and
`tensor.data = …` do, changes nothing here: the memory of the boundary is held.

`choose` decides which may wait: large tensors in the state of tracked `torch.optim.Optimizer`s, as `state_dict` gives them, in
memory of the CPU that they share with nothing else in the snapshot. Small ones are copied as quickly as noted. Those of an
accelerator are copied at the boundary, since order on its streams is not ours to keep; so is all that a script may change at
any time: parameters, buffers, gradients, `job.state`.

Torch does not count what is written past it: through `tensor.data`, or an array of `tensor.numpy()`. That is what samples are
for. A script that changes a few elements so, between a boundary and the next update, is not noticed.

The engine itself changes no optimizer's state in place. Newcomers replay updates by their optimizers' `step`, and write no
checkpoint while they do. Recovery runs micro-batches again, and makes no updates. A resumed job, and a newcomer at the fence,
load what they are told by `load_state_dict`, before anything is taken. The donor reads what we read. A worker that leaves, and
a job that ends, collect the writer first. When a script has raised, the process ends only when the thread has.
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


class Spoiled(Exception):
    """Somebody changed a tensor before it was copied."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.tensor = tensor
        """Its name in the snapshot."""


def choose(rows: Sequence[FlatRow], steady: Iterable[torch.Tensor], tied: Collection[str]) -> list[FlatRow]:
    """Those that may be copied late. `steady` only an optimizer's step changes; `tied` stand in several places."""
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
    """Rows that are to be copied, by the writer's thread and by training when it can do nothing else."""

    def __init__(self, rows: Sequence[FlatRow]) -> None:
        """At the boundary."""
        held = [FlatRow(row.name, row.tensor.detach(), row.room) for row in rows]
        self._noted = [(row, _look_of(row.tensor)) for row in held]
        self._copying = FlatCopy(held)
        self._looking = threading.Lock()
        self._looked = False
        self._changed: str | None = None
        self.waited = 0.0
        """Seconds for which training stood still in `settle`."""

    def complete(self) -> None:
        """In the writer's thread: return when all is copied."""
        self._copying.complete()

    def settle(self) -> None:
        """In the training thread: from here on tensors may change."""
        since = time.monotonic()
        self._copying.complete()
        self._look()
        self.waited += time.monotonic() - since

    def require_exact(self) -> None:
        """In the writer's thread, when all is copied: raise if it is not the state of the boundary."""
        self._look()
        if self._copying.failure is not None:
            raise self._copying.failure
        if self._changed is not None:
            raise Spoiled(self._changed)

    def _look(self) -> None:
        """Once, by whoever comes first: after that training is free to change them."""
        with self._looking:
            if self._looked:
                return
            self._looked = True
            changed = (row.name for row, noted in self._noted if _look_of(row.tensor) != noted)
            self._changed = next(changed, None)
            self._noted.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    """On the CPU, counted, and without gaps."""
    return (
        tensor.device.type == "cpu"
        and not tensor.is_inference()  # it has no version
        and (tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()))
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _look_of(tensor: torch.Tensor) -> tuple[int, int, bytes]:
    """Another one if the tensor has changed, as far as can be told without reading all of it."""
    count = min(tensor.numel(), _SAMPLES)
    sample = tensor.as_strided((count,), (tensor.numel() // count,))  # in whatever order its dimensions are
    return tensor._version, tensor.data_ptr(), byte_row(sample).numpy().tobytes()

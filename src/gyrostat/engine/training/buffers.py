"""Buffers as DDP's ranks would see them, with one model per worker.

DDP starts a forward with rank 0's buffers if the module's previous forward was one that synchronises gradients, and
with the rank's own buffers otherwise (`broadcast_buffers=False`, all but the first forward under `no_sync`, the forward
after one without gradients). So between micro-batches a virtual worker keeps buffers of its own only in the second
case; in the first they are virtual worker 0's, which are part of the shared state.

A second synchronising forward within one pass needs virtual worker 0's buffers as they are at that moment: its worker
publishes them, the others wait for them, just as DDP's broadcast does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gyrostat.core.errors import Misuse
from gyrostat.engine.torch_internals import keeping_versions, outside_graphs
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.transport.pending import Pending


@dataclass
class _PassBuffers:
    """The buffers of a module during one pass."""

    shared: list[torch.Tensor] | None = None
    """At the start of the pass, if needed again."""
    next_shared: list[torch.Tensor] | None = None
    """Virtual worker 0's after the pass, where it ran."""
    published: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Virtual worker 0's in the pass, by number of the forward."""
    sending: list[Pending] = field(default_factory=list)


class ModuleBuffers:
    """The buffers of one tracked module."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        trained: bool,
        broadcast: bool,
        generation: CurrentGeneration,
    ) -> None:
        """`trained`: a DDP instance. The buffers of other modules are simply shared: virtual worker 0's.

        `broadcast`: DDP's `broadcast_buffers`.
        """
        self.name = name
        self._module, self._trained = module, trained
        self._broadcast, self._generation = broadcast, generation
        self._slots = slots_of(module)
        self._holders: list[dict[str, Any]] = []  # of all submodules, at the start of the pass
        self._marks: list[tuple[torch.Tensor, int]] = []  # tensors and versions as the last pass left them
        self._pass = _PassBuffers()
        self._rank: int | None = None
        self._forwards = 0
        self._synchronise = True
        self._last_micro_batch = True
        if self:
            module.register_forward_pre_hook(outside_graphs(self._before_forward))
            module.register_forward_hook(outside_graphs(self._after_forward))

    def __bool__(self) -> bool:
        return any(part._buffers for part in self._module.modules())

    def current(self) -> list[torch.Tensor]:
        return [holder[key] for holder, key in self._slots]

    def changed(self) -> list[int]:
        """The numbers of the buffers that the script has set, for all virtual workers, since the last pass."""
        return [
            number
            for number, (tensor, (marked, version)) in enumerate(
                zip(self.current(), self._marks, strict=False)
            )
            if tensor is not marked or tensor._version != version
        ]

    def begin_pass(self, *, several: bool) -> None:
        """Before the first virtual worker. `several`: more than one runs here, or may, so changes must be undone."""
        self._holders = _holders_of(self._module)
        self._slots = _slots_in(self._holders)
        self._pass = _PassBuffers(shared=_copies(self.current()) if several else None)

    def enter(self, rank: int, own: list[torch.Tensor] | None, *, first: bool) -> None:
        """Switch in virtual worker `rank`, with its own buffers if it has any. `first`: no other ran in this pass."""
        self._rank, self._forwards = rank, 0
        self._synchronise = own is None
        if own is not None:
            self._load(own)
        elif not first and self._pass.shared is not None:
            self._load(self._pass.shared)

    def micro_batch(self, *, last: bool) -> None:
        """Gradients are synchronised in the last micro-batch of a pass only (DDP's `no_sync` before)."""
        self._last_micro_batch = last

    def leave(self, rank: int, *, alone: bool) -> list[torch.Tensor] | None:
        """Switch out virtual worker `rank`; returns the buffers it must keep. `alone`: no other runs here after it."""
        self._check_slots(_slots_in(self._holders), f"virtual worker {rank}")
        shared = not self._trained or (self._synchronise and self._broadcast)
        keep = None if shared else _copies(self.current())
        if rank == 0 and not alone:
            self._pass.next_shared = _copies(self.current())
        self._rank = None
        return keep

    def end_pass(self) -> None:
        """After the last virtual worker: on its worker, put virtual worker 0's buffers into the model."""
        self._check_slots(slots_of(self._module), "a virtual worker")  # submodules may have been added
        if self._pass.next_shared is not None:
            self._load(self._pass.next_shared)
        sending, self._pass.sending = self._pass.sending, []
        for pending in sending:
            pending.wait()

    def restore(self, tensors: list[torch.Tensor]) -> None:
        self._load(tensors)

    def mark(self) -> None:
        """The pass is over: what the script changes from now on, it changes for all virtual workers."""
        self._marks = [(tensor, tensor._version) for tensor in self.current()]

    def _check_slots(self, now: list[tuple[dict[str, Any], str]], whose: str) -> None:
        if len(now) != len(self._slots):
            raise Misuse(
                f"{self.name!r} got or lost a buffer in a micro-batch of {whose}; register all buffers, with "
                "their final shapes, before job.track"
            )

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._rank is None:
            return
        if self._trained and self._synchronise and self._broadcast and self._forwards > 0:
            self._use_published(self._forwards)
        self._forwards += 1

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._rank is not None:
            self._synchronise = torch.is_grad_enabled() and self._last_micro_batch

    def _use_published(self, forward: int) -> None:
        """Use virtual worker 0's buffers, in the middle of a pass."""
        group, main = self._generation.group, self._generation.main_worker
        if self._rank == 0:
            # If it runs again after a death, all survivors have them already.
            if forward not in self._pass.published:
                self._pass.published[forward] = _copies(self.current())
                if group.size > 1:
                    packed = pack(self._pass.published[forward])
                    self._pass.sending.append(group.broadcast(packed, main))
            return
        if forward not in self._pass.published:
            if group.rank == main:
                raise Misuse(
                    f"virtual worker {self._rank} ran {self.name!r} more often in one micro-batch than virtual worker 0, whose "
                    "buffers it needs; DDP would wait forever. Run the same forwards in every micro-batch"
                )
            current = self.current()
            packed = group.broadcast(torch.empty_like(pack(current)), main).wait()
            self._pass.published[forward] = unpack(packed, current)
        current = self.current()
        # As DDP does: an earlier forward of this micro-batch may still need its version counters.
        with keeping_versions(current):
            self._load(self._pass.published[forward])

    def _load(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for (holder, key), tensor in zip(self._slots, tensors, strict=True):
                held = holder[key]
                if held.shape == tensor.shape and held.dtype == tensor.dtype:
                    held.copy_(tensor)
                else:  # the module has replaced its tensor
                    holder[key] = tensor.clone()


def pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All tensors as one row of bytes."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in tensors])


def unpack(data: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `pack`, with the shapes and types of `like`."""
    tensors, offset = [], 0
    for tensor in like:
        part = data[offset : offset + tensor.nbytes].clone()
        tensors.append(part.view(tensor.dtype).reshape(tensor.shape).to(tensor.device))
        offset += tensor.nbytes
    return tensors


def slots_of(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The dict and key of each buffer. Not the tensors: a module may replace them."""
    return _slots_in(_holders_of(module))


def restore_buffers(
    slots: Sequence[tuple[dict[str, Any], str]], saved: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Put back the tensors that were in the slots, with their values and version counters."""
    with torch.no_grad(), keeping_versions([tensor for tensor, _ in saved]):
        for (holder, key), (tensor, value) in zip(slots, saved, strict=True):
            tensor.copy_(value)
            holder[key] = tensor


def _holders_of(module: nn.Module) -> list[dict[str, Any]]:
    return [part._buffers for part in module.modules()]


def _slots_in(holders: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    return [(holder, key) for holder in holders for key, tensor in holder.items() if tensor is not None]


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]

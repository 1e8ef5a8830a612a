"""At the end of a pass virtual worker 0's buffers become the shared ones, on every worker."""

from __future__ import annotations

import torch
from torch import nn

from gyrostat.engine.training.buffers import ModuleBuffers, pack, unpack
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.transport.pending import Pending


class BufferSync:
    """The buffers of all tracked modules."""

    def __init__(self, generation: CurrentGeneration) -> None:
        self._generation = generation
        self.modules: list[ModuleBuffers] = []
        """Those that have buffers."""
        self.last: torch.Tensor | None = None
        """Virtual worker 0's after the last pass, packed: for a worker that missed them."""
        self._pending: Pending | None = None

    def add(self, name: str, module: nn.Module, *, trained: bool, broadcast: bool) -> None:
        """A module was tracked. `trained`, `broadcast`: as for `ModuleBuffers`."""
        buffers = ModuleBuffers(
            name, module, trained=trained, broadcast=broadcast, generation=self._generation
        )
        if buffers:
            self.modules.append(buffers)

    def send_off(self) -> None:
        """Begin to broadcast virtual worker 0's buffers."""
        if self.modules:
            self._pending = self._generation.group.broadcast(
                pack(self._current()), self._generation.main_worker
            )

    def complete(self) -> None:
        """Wait for the broadcast. Raises `PeerLost`."""
        if self._pending is not None:
            self._pending.wait()

    def settle(self) -> None:
        """The pass is complete: put the received buffers into the modules."""
        if self._pending is not None:
            packed, self._pending = self._pending.wait(), None
            self.last = packed
            if not self._generation.is_main:
                self._load(packed)
        for buffers in self.modules:
            buffers.mark()

    def interrupt(self) -> None:
        """A worker was lost: the broadcast under way will not complete."""
        self._pending = None

    def empty_like_packed(self) -> torch.Tensor:
        """Room for the packed buffers of a pass that this worker missed."""
        return torch.empty_like(pack(self._current()))

    def receive_missed(self, packed: torch.Tensor) -> None:
        """The packed buffers of the pass that this worker missed; `settle` uses them."""
        self._pending = Pending([], packed, lambda works: None)

    def _current(self) -> list[torch.Tensor]:
        return [tensor for buffers in self.modules for tensor in buffers.current()]

    def _load(self, packed: torch.Tensor) -> None:
        received = unpack(packed, self._current())
        for buffers in self.modules:
            count = len(buffers.current())
            buffers.restore(received[:count])
            received = received[count:]

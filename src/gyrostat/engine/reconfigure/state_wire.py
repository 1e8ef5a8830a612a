"""The wire between one member of the job, the donor, and the newcomers.

The donor sends states, one after the other: plain values in a message, and tensors in a block of memory. On one machine
the block is shared memory, and only its address is sent; between machines its contents are. A newcomer acknowledges each
state when it does not need the block any more. Shared memory has no name in the file system: newcomers open it through the
donor's file descriptors, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch

from gyrostat.core.job import NextGeneration
from gyrostat.engine.state.flatcopy import copy_into, size_of, views_of
from gyrostat.engine.state.statetree import Flat, Skeleton, flatten, unflatten
from gyrostat.engine.torch_internals import gloo_group, rendezvous
from gyrostat.engine.transport.pending import losing_peers

_DONOR = 0
_MOST_UNDER_WAY = 8
"""Acknowledgements that the donor has not received; there are three at most."""
_LEAST_PART, _MOST_PARTS, _PAUSE_S = 2 << 20, 64, 0.02
"""How shared memory is released while training goes on: in parts of some bytes, with pauses."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    skeleton: Skeleton
    block: tuple[str, int | None] | None
    """The address of the tensors, and the unique number of a block that may be used again; None: the tensors follow."""
    size: int


class Block:
    """Memory for the tensors of one state, used again for the next one that fits, unless it is used `once`."""

    _numbers = itertools.count()

    def __init__(self, size: int, *, shared: bool, once: bool = False) -> None:
        self.size = size
        self.number = None if once else next(self._numbers)
        self.address: str | None = None
        self._file: int | None = None
        if shared:
            self._file = os.memfd_create("gyrostat", os.MFD_CLOEXEC)
            os.ftruncate(self._file, max(size, 1))
            self.address = f"/proc/{os.getpid()}/fd/{self._file}"
            self.memory = torch.frombuffer(mmap.mmap(self._file, max(size, 1)), dtype=torch.uint8)
        else:
            self.memory = torch.empty(size, dtype=torch.uint8)

    def close(self, *, gently: bool = False) -> None:
        """Release the memory. `gently`: slowly, so that training is not disturbed; blocks until it is done."""
        if self._file is None:
            return
        if gently:
            for left in _smaller_and_smaller(self.size):
                os.ftruncate(self._file, left)
                time.sleep(_PAUSE_S)
        os.close(self._file)
        self._file = None


class ReceivedState:
    """A state as received. Its tensors are valid until it is acknowledged."""

    def __init__(self, skeleton: Skeleton, memory: torch.Tensor, wire: StateWire) -> None:
        self._skeleton, self._memory, self._wire = skeleton, memory, wire
        self.state: Any = unflatten(skeleton, views_of(memory, skeleton))

    def owned(self) -> Any:
        """The state with tensors of its own."""
        return unflatten(self._skeleton, [view.clone() for view in views_of(self._memory, self._skeleton)])

    def acknowledge(self) -> None:
        self.state, self._memory = None, torch.empty(0, dtype=torch.uint8)
        self._wire.acknowledge()


class StateWire:
    """The donor, which is number 0, and the newcomers. What the donor sends, all newcomers receive."""

    def __init__(self, plan: NextGeneration, member: int, timeout_s: float, host: str = "127.0.0.1") -> None:
        ends, timeout = (plan.donor, *plan.newcomers), timedelta(seconds=timeout_s)
        self._newcomers = range(1, len(ends))
        with losing_peers():
            store = rendezvous(f"{plan.store}-handover", len(ends), f"generation-{plan.generation}", timeout)
            self._gloo: Any = gloo_group(store, ends.index(member), len(ends), timeout, host)
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque(maxlen=_MOST_UNDER_WAY)
        self._maps: dict[int, torch.Tensor] = {}
        self.is_donor = member == plan.donor
        self.shared = self._offer() if self.is_donor else self._look()
        """Whether donor and newcomers have memory in common."""

    @staticmethod
    def concerns(plan: NextGeneration, member: int) -> bool:
        return bool(plan.newcomers) and (member == plan.donor or member in plan.newcomers)

    # The donor.

    def make_block(self, size: int, *, once: bool = False) -> Block:
        """`once`: newcomers need not keep it mapped."""
        return Block(size, shared=self.shared, once=once)

    def send_and_wait(self, flat: Flat, block: Block) -> None:
        """Send a state whose tensors are in `block`; returns when all newcomers have acknowledged it."""
        self.send(flat, block)
        self.verdicts()

    def send(self, flat: Flat, block: Block, *, to: Sequence[int] | None = None) -> None:
        """The same without waiting, to newcomers of these numbers: the acknowledgements will be their next `verdicts`."""
        size = size_of(flat.skeleton)
        where = None if block.address is None else (block.address, block.number)
        header = _bytes(msgspec.json.encode(_Header(flat.skeleton, where, size)))
        for newcomer in self._newcomers if to is None else to:
            self._send(header, newcomer)
            if where is None and size:
                self._send_row(block.memory[:size], newcomer)

    def pack(self, tree: Any) -> tuple[Flat, Block]:
        """A copy of a state, to be sent."""
        flat = flatten(tree)
        block = self.make_block(size_of(flat.skeleton))
        return copy_into(block.memory, flat), block

    def verdicts(self, of: Sequence[int] | None = None) -> dict[int, int]:
        """One number from every newcomer, by the newcomer's number."""
        given = {}
        for newcomer in self._newcomers if of is None else of:
            row = torch.empty(1, dtype=torch.int64)
            self._receive_row(row, newcomer)
            given[newcomer] = int(row.item())
        return given

    # Newcomers.

    def receive(self) -> ReceivedState:
        header = msgspec.json.decode(self._receive_message(), type=_Header)
        if header.block is not None:
            memory = self._mapped(*header.block)[: header.size]
        else:
            memory = torch.empty(header.size, dtype=torch.uint8)
            if header.size:
                self._receive_row(memory, _DONOR)
        return ReceivedState(header.skeleton, memory, self)

    def acknowledge(self, verdict: int = 0) -> None:
        """Send the donor a number. Does not wait until it is received: the donor may be sending."""
        row = torch.tensor([verdict], dtype=torch.int64)
        with losing_peers():
            self._under_way.append((self._gloo.send([row], _DONOR, 0), row))

    def _mapped(self, address: str, number: int | None) -> torch.Tensor:
        if number is None:
            return _map(address)
        if number not in self._maps:
            self._maps[number] = _map(address)
        return self._maps[number]

    # Both.

    def _offer(self) -> bool:
        """Whether all newcomers can read a block of the donor."""
        if not hasattr(os, "memfd_create"):
            for newcomer in self._newcomers:
                self._send(torch.empty(0, dtype=torch.uint8), newcomer)
            return False
        block = Block(16, shared=True)
        secret = secrets.token_bytes(16)
        block.memory[:] = _bytes(secret)
        for newcomer in self._newcomers:
            self._send(_bytes(msgspec.json.encode((block.address, secret))), newcomer)
        seen = all(self.verdicts().values())
        for newcomer in self._newcomers:
            self._send_row(torch.tensor([int(seen)], dtype=torch.int64), newcomer)
        block.close()
        return seen

    def _look(self) -> bool:
        offer = self._receive_message()
        if not offer:
            return False
        address, secret = msgspec.json.decode(offer, type=tuple[str, bytes])
        try:
            same = _map(address)[:16].numpy().tobytes() == secret
        except (OSError, ValueError):  # another machine, or another process there
            same = False
        self.acknowledge(int(same))
        seen = torch.empty(1, dtype=torch.int64)
        self._receive_row(seen, _DONOR)
        return bool(seen.item())

    def _send(self, row: torch.Tensor, to: int) -> None:
        self._send_row(torch.tensor([row.numel()], dtype=torch.int64), to)
        if row.numel():
            self._send_row(row, to)

    def _receive_message(self) -> bytes:
        length = torch.empty(1, dtype=torch.int64)
        self._receive_row(length, _DONOR)
        row = torch.empty(int(length.item()), dtype=torch.uint8)
        if row.numel():
            self._receive_row(row, _DONOR)
        return row.numpy().tobytes()

    def _send_row(self, row: torch.Tensor, to: int) -> None:
        with losing_peers():
            self._gloo.send([row], to, 0).wait()

    def _receive_row(self, row: torch.Tensor, source: int) -> None:
        with losing_peers():
            self._gloo.recv([row], source, 0).wait()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the donor is gone
            for work, _ in self._under_way:
                work.wait()
        self._under_way.clear()
        self._gloo = None
        self._maps.clear()


def _smaller_and_smaller(size: int) -> range:
    """The sizes through which a block shrinks."""
    part = max(_LEAST_PART, -(-size // _MOST_PARTS))
    return range(size - part, 0, -part)


def _map(address: str) -> torch.Tensor:
    file = os.open(address, os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    finally:
        os.close(file)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

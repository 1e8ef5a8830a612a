"""How a newcomer gets the job's state before the fence, while training goes on.

The donor copies, at a boundary before the fence, what its optimizers own: parameters and optimizer state. From then on
it sends every update, in the pre-hook of the optimizer's `step`: gradients as the script left them, and the values of the
parameter groups. The newcomer loads the copy and makes the same updates with its own optimizer. Everything else that is tracked
(buffers, schedulers, `job.state` …) is sent at the fence, as a whole; there both sides compare checksums of what was replayed.
If they differ, and wherever an update cannot be sent (a closure, a newcomer that cannot keep up), all state is sent at
the fence, with the reason.

`StateSender` is the donor's side: everything slow happens in its thread. The copy is made while micro-batches run, which change
neither parameters nor optimizer state; `settle` waits for it before the script can. (A script that changes them earlier in its
step invalidates the copy, and the checksums differ.) `StateReceiver` is the newcomer's side.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch
from torch.optim import Optimizer

from gyrostat.core.errors import PeerLost
from gyrostat.engine.reconfigure.state_wire import Block, StateWire
from gyrostat.engine.state.flatcopy import copy_into, size_of
from gyrostat.engine.state.statetree import Flat, flatten
from gyrostat.engine.state.tensorbytes import byte_row

_ROOM_FOR_UPDATES = 512 << 20
"""Bytes of gradients that may wait for newcomers; at least `_FEWEST` updates in any case."""
_FEWEST = 4
_MOST = 256
"""Updates that may wait for newcomers, however small they are: those of short steps come faster than any newcomer replays them,
and it would never catch up."""
_COLUMNS = 4096
_MOST_THREADS = 4

Optimizers = Mapping[str, Optimizer]


class StateSender:
    """The donor's side, for one generation."""

    def __init__(
        self, wire: StateWire, optimizers: Optimizers, hints: Mapping[str, Any] | None = None
    ) -> None:
        """At a boundary: the copy is of this instant. `hints`: what newcomers can prepare besides."""
        self._wire, self._optimizers = wire, optimizers
        self.broken: str | None = None
        """Why the state cannot be replayed; None as long as it can."""
        self._changed = threading.Condition()
        self._copied, self._ended = threading.Event(), threading.Event()
        self._waiting: deque[tuple[Flat, Block]] = deque()
        self._free: list[Block] = []
        self._fence_state: tuple[Flat, Block] | None = None
        self._closed = False
        self._sums: Future[dict[str, int]] | None = None
        copy = flatten({"what": "copy", "hints": dict(hints or {}), **_owned(optimizers)})
        threading.Thread(target=self._run, args=(copy,), name="gyrostat-stream", daemon=True).start()

    def settle(self) -> None:
        """The script may change parameters from here on: wait until they have been copied."""
        self._copied.wait()

    def before_update(self, name: str, optimizer: Optimizer, *, repeatable: bool) -> None:
        """The script's optimizer is about to make an update. `repeatable`: by a plain `step()`."""
        if self.broken is not None or self._over():
            return
        if not repeatable:
            self.broken = f"{name} makes its updates by a closure, which only the script can call"
            return
        parameters = list(_parameters(optimizer))
        flat = flatten(
            {
                "what": "update",
                "optimizer": name,
                "groups": _group_values(optimizer),
                "gradients": [None if p.grad is None else p.grad.detach() for p in parameters],
            }
        )
        block = self._find_room(size_of(flat.skeleton))
        if block is None:
            self.broken = f"newcomers could not keep up: {len(self._waiting)} updates wait for them"
            return
        copy = copy_into(block.memory, flat)
        with self._changed:
            self._waiting.append((copy, block))
            self._changed.notify_all()

    def send_data(self, data: Mapping[str, Any]) -> None:
        """Send the data positions of virtual workers at the fence."""
        packed = self._wire.pack({"what": "data", **data})
        with self._changed:
            self._waiting.append(packed)
            self._changed.notify_all()

    def at_fence(self) -> None:
        """The boundary of the fence. Unless the change is called off, no state may change before `join` has returned."""
        if self.broken is None:
            helper = ThreadPoolExecutor(1, "gyrostat-checksum")
            self._sums = helper.submit(checksums, self._optimizers)
            helper.shutdown(wait=False)

    def end(self, rest: Any) -> None:
        """All members are at the fence: send the `rest`, and compare checksums."""
        fence = {"what": "fence", "rest": rest, "streamed": self.broken is None, "why": self.broken}
        packed = self._wire.pack(fence)
        with self._changed:
            self._fence_state = packed
            self._changed.notify_all()

    def join(self) -> None:
        """Until newcomers have all they need. Memory and connections are released in the background."""
        self._ended.wait()

    def close(self) -> None:
        """The generation will not begin."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _find_room(self, size: int) -> Block | None:
        with self._changed:
            if len(self._waiting) >= _MOST:
                return None
            fitting = [block for block in self._free if block.size >= size]
            if fitting:
                self._free.remove(fitting[0])
                return fitting[0]
            waiting = sum(block.size for _, block in self._waiting)
            if len(self._waiting) >= _FEWEST and waiting + size > _ROOM_FOR_UPDATES:
                return None
        return self._wire.make_block(size)

    # In the thread.

    def _run(self, copy: Flat) -> None:
        parted = False
        try:
            self._send_copy(copy)
            while (update := self._next()) is not None:
                flat, block = update
                self._wire.send_and_wait(flat, block)
                with self._changed:
                    self._free.append(block)
            if self._fence_state is not None and not self._closed:
                self._send_fence_state(*self._fence_state)
                parted = True
        except PeerLost:
            pass  # the coordinator learns of it, too
        finally:
            self._closed = True
            self._copied.set()
            self._ended.set()
            self._wire.close()
            for block in (*self._free, *(block for _, block in self._waiting)):
                block.close(gently=parted)

    def _send_copy(self, flat: Flat) -> None:
        block = self._wire.make_block(size_of(flat.skeleton), once=True)
        try:
            copy = copy_into(block.memory, flat)
            self._copied.set()
            self._wire.send_and_wait(copy, block)
        finally:
            block.close()

    def _next(self) -> tuple[Flat, Block] | None:
        """The next update; None after the last. Newcomers get a notice whenever they have received all updates."""
        with self._changed:
            if not self._waiting and not self._over():
                self._changed.release()
                try:
                    self._send_small({"what": "all"})
                finally:
                    self._changed.acquire()
            self._changed.wait_for(lambda: self._waiting or self._over())
            return self._waiting.popleft() if self._waiting and not self._closed else None

    def _send_small(self, message: Any) -> None:
        flat, block = self._wire.pack(message)
        self._wire.send_and_wait(flat, block)
        block.close()

    def _over(self) -> bool:
        return self._closed or self._fence_state is not None

    def _send_fence_state(self, rest: Flat, block: Block) -> None:
        wire = self._wire
        wire.send(rest, block)
        if self.broken is None:
            assert self._sums is not None
            sums, small = wire.pack(self._sums.result())
            wire.send(sums, small)
            wire.verdicts()
            wire.verdicts()
            differ = [newcomer for newcomer, agrees in wire.verdicts().items() if not agrees]
            small.close()
            if differ:
                copy, large = wire.pack(_owned(self._optimizers))
                wire.send(copy, large, to=differ)
                wire.verdicts(differ)
                large.close()
        else:
            wire.verdicts()
        block.close()


class StateReceiver:
    """The newcomer's side."""

    def __init__(self, wire: StateWire, optimizers: Optimizers) -> None:
        self._wire, self._optimizers = wire, optimizers
        self.streamed = False
        """Known at the fence: what optimizers own was replayed and is not sent there."""
        self.why_not: str | None = None
        """Why all state had to be sent at the fence; None if it did not."""

    def follow(
        self,
        caught_up: Callable[[], None],
        take_hints: Callable[[Any], None],
        take_data: Callable[[Any], None],
    ) -> Any:
        """Load and replay until the fence; returns the rest. `caught_up` is called once nothing is left to replay."""
        while True:
            received = self._wire.receive()
            match received.state["what"]:
                case "copy":
                    self._try(self._load, received.state)
                    take_hints(received.state["hints"])
                case "update":
                    self._try(self._replay, received.state)
                case "data":
                    take_data(received.owned())
                case "all":
                    caught_up()
                case "fence":
                    fence = received.owned()
                    received.acknowledge()
                    self.streamed, self.why_not = fence["streamed"], fence["why"] or self.why_not
                    return fence["rest"]
            received.acknowledge()

    def confirm(self) -> None:
        """The rest is in place: compare what was replayed with the donor's state, and receive that if they differ."""
        if self.streamed:
            mine = checksums(self._optimizers)
            theirs = self._wire.receive()
            self.why_not = self.why_not or _difference(theirs.state, mine)
            theirs.acknowledge()
            self._wire.acknowledge(int(self.why_not is None))
            if self.why_not is not None:
                copy = self._wire.receive()
                self._load(copy.state)
                copy.acknowledge()
        threading.Thread(target=self._wire.close, name="gyrostat-close", daemon=True).start()

    def _try(self, do: Callable[[Any], None], message: Any) -> None:
        """If it fails, all state is sent at the fence instead."""
        if self.why_not is None:
            try:
                do(message)
            except (ValueError, RuntimeError, KeyError, TypeError) as error:
                self.why_not = f"replaying failed: {error}"

    def _load(self, copy: Any) -> None:
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(_cloned(copy["optimizers"][name]))
            with torch.no_grad():
                for parameter, value in zip(_parameters(optimizer), copy["parameters"][name], strict=True):
                    parameter.copy_(value)

    def _replay(self, update: Any) -> None:
        optimizer = self._optimizers[update["optimizer"]]
        for group, values in zip(optimizer.param_groups, update["groups"], strict=True):
            group.update(values)
        parameters = list(_parameters(optimizer))
        try:
            for parameter, gradient in zip(parameters, update["gradients"], strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            optimizer.step()
        finally:
            for parameter in parameters:
                parameter.grad = None


def owned_by(optimizers: Optimizers) -> list[torch.Tensor]:
    """The parameters that `optimizers` update."""
    return [parameter for optimizer in optimizers.values() for parameter in _parameters(optimizer)]


def checksums(optimizers: Optimizers) -> dict[str, int]:
    """A fast checksum of everything that optimizers own, tensor by tensor. It finds accidents, not intent.

    Training waits for it, so several threads compute it.
    """
    flat = flatten(_owned(optimizers))
    names, tensors = [name for name, _ in flat.tensors], [tensor for _, tensor in flat.tensors]
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "gyrostat-checksum") as helpers:
        sums = dict(zip(names, helpers.map(_checksum, tensors), strict=True))
    return sums | {"values": zlib.crc32(msgspec.json.encode(flat.skeleton))}


def _checksum(tensor: torch.Tensor) -> int:
    """Words are added in columns: as fast as memory is read, and a swap of two words of different columns is found."""
    if not tensor.numel():
        return 0
    row = byte_row(tensor).cpu().numpy()
    whole = row.size - row.size % (_COLUMNS * 8)
    columns = np.add.reduce(row[:whole].view(np.uint64).reshape(-1, _COLUMNS), axis=0)
    return zlib.crc32(row[whole:].data, zlib.crc32(columns.data))


def _difference(wanted: Mapping[str, int], found: Mapping[str, int]) -> str | None:
    different = [name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)]
    if not different:
        return None
    return (
        f"{len(different)} of {len(wanted)} checksums differ after replaying, first that of {min(different)}"
    )


def _owned(optimizers: Optimizers) -> dict[str, Any]:
    return {
        "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
        "parameters": {
            name: [parameter.detach() for parameter in _parameters(optimizer)]
            for name, optimizer in optimizers.items()
        },
    }


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _cloned(tree: Any) -> Any:
    """A copy: an optimizer keeps the tensors that it is given."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _cloned(value) for key, value in tree.items()}
    return [_cloned(value) for value in tree] if isinstance(tree, list) else tree

"""What one mini-batch is composed of: the interfaces of the parts that `mini_batch.py` drives.

There are two implementations of each. The engine's own run N virtual workers on any number of workers (`context_switch.py`,
`batch_sources.py`, `gradient_sync.py`, `buffer_sync.py`). Those of `reference.py` are torch's DistributedDataParallel on N
processes, which `gyrostat verify` compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from gyrostat.data.rng import RngState, Streams
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.training.plan import DataLoop, StepPlan

Fetch = Callable[[StepPlan, int, int, int], Any]
"""The micro-batch of a plan, for a rank, by its number in the step and the number of the pass."""


class Contexts(Protocol):
    """Random streams, buffers and `step.local` of the local virtual workers."""

    streams: Streams

    def start(self, *, same: bool = False) -> None:
        """Before training: virtual worker r's streams begin as if seeded with seed + r, or with `same` as the script's."""

    def begin_pass(self) -> None: ...

    def switch_in(self, rank: int, *, survey: bool = False) -> None: ...

    def begin_micro_batch(self, *, last: bool) -> None: ...

    def switch_out(self, rank: int, *, survey: bool = False) -> None: ...

    def end_pass(self) -> None: ...

    def random_states(self) -> dict[int, RngState]:
        """The streams of the local virtual workers, between passes."""

    def local(self, rank: int) -> dict[str, Any]:
        """`step.local`."""


class Batches(Protocol):
    """The micro-batches of the local virtual workers."""

    def begin_loop(self, loop: DataLoop) -> None:
        """A loop over a loader begins."""

    def available(self, count: int, done: int) -> int:
        """How many of the next `count` micro-batches every local virtual worker has, after `done` steps of the loop."""

    def forget_available(self) -> None:
        """Another step: `available` asks every virtual worker again."""

    def begin_pass(self, plan: StepPlan, pass_: int) -> None: ...

    def fetch(self, plan: StepPlan, rank: int, number: int, pass_: int) -> Any: ...

    @property
    def samples(self) -> int:
        """Samples that the local virtual workers have fetched in this step."""

    def in_every_stream(self, do: Callable[[], Any]) -> None:
        """`do()`, outside a pass, with the streams of each local virtual worker in force."""

    def end_loop(self, *, used_up: bool) -> None:
        """The loop is over: all micro-batches were consumed, or the script has left it."""


class Gradients(Protocol):
    """The gradients of all tracked modules."""

    @property
    def reduced(self) -> frozenset[int] | None:
        """The identities of all parameters whose gradients are reduced; None: DDP checks that itself."""

    def add(self, name: str, module: nn.Module, options: DdpOptions) -> bool:
        """A module was tracked. Returns whether it has trainable parameters."""

    def begin_pass(self) -> None: ...

    def begin_rank(self, rank: int, weight: float | None, *, last_here: bool) -> None: ...

    def begin_micro_batch(self, *, last: bool) -> None: ...

    def before_backward(self, *, first: bool) -> None: ...

    def after_backward(self, *, last: bool) -> None: ...

    def participation(self) -> bytes: ...

    def send_off(self) -> None: ...

    def complete(self, participations: Sequence[bytes]) -> None: ...

    def settle(self, participations: Sequence[bytes]) -> None: ...

    def compensate(self, left_out: int) -> None: ...


class Buffers(Protocol):
    """The buffers of all tracked modules, as shared between passes."""

    def add(self, name: str, module: nn.Module, *, trained: bool, broadcast: bool) -> None:
        """A module was tracked."""

    def send_off(self) -> None: ...

    def complete(self) -> None: ...

    def settle(self) -> None: ...


class ComputeDevice(Protocol):
    """The device that computes micro-batches."""

    def add(self, name: str, module: nn.Module) -> None:
        """A module was tracked."""

    def fetch_from(self, batches: Batches) -> Fetch:
        """How this device gets its micro-batches."""

    def begin(self) -> None:
        """The script is given the micro-batch that was fetched."""

    def wait(self) -> None:
        """Backward is done."""


class RealDevice:
    """A device that takes the time it takes."""

    def add(self, name: str, module: nn.Module) -> None:
        pass

    def fetch_from(self, batches: Batches) -> Fetch:
        return batches.fetch

    def begin(self) -> None:
        pass

    def wait(self) -> None:
        pass

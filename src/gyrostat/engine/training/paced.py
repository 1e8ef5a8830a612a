"""A paced device: it takes the time that a device of a declared speed would take, and computes next to nothing.

It measures more workers than a machine has cores, so that contention for cores is not mistaken for cost. Around a
micro-batch everything is real: processes, data, streams, reductions, updates, fences, checkpoints. The micro-batch itself
is a wait, and the script need not know:

1. The forwards of tracked modules are replaced. They return zeros of the shapes that torch's meta device finds for such
   an input; the script's own loss is computed from them as always.
2. `step.backward` goes back through that loss. When it reaches a tracked module, gradients are filled: each parameter's with
   one number, a fixed function of the micro-batch's sample indices and of the parameter's position. So digests still show
   whether every virtual worker got its samples and every gradient was added in its order.
3. There it waits until the micro-batch has taken samples / rate seconds since the script was given it, and only
   then are the gradients ready, all at once: no part of their exchange hides behind a backward that is not run.

Each deadline counts from the moment its micro-batch is handed out. The engine's work before, between and after micro-batches
is not compensated: it makes the step longer, as it would on a device.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from gyrostat.core.errors import UsageError
from gyrostat.data.rng import Streams
from gyrostat.engine.training.parts import Batches, Fetch
from gyrostat.engine.training.plan import StepPlan


class PacedDevice:
    """A device that processes `rate` samples per second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._modules = 0
        self._content = 0
        self._samples = 0
        self._deadline = 0.0

    def add(self, name: str, module: nn.Module) -> None:
        """A module was tracked: from now on `module(…)` computes nothing."""
        module.forward = _Forward(self, self._modules, name, module)
        self._modules += 1

    def fetch_from(self, batches: Batches) -> Fetch:
        """How this device gets its micro-batches: each is loaded with its content and number of samples."""
        sizes: dict[tuple[int, int], int] = {}

        def fetch(plan: StepPlan, rank: int, number: int, pass_: int) -> Any:
            before = batches.samples
            batch = batches.fetch(plan, rank, number, pass_)
            # A later pass fetches the same samples again, uncounted.
            samples = sizes[rank, number] = batches.samples - before or sizes[rank, number]
            self.load(plan.content(rank, number), samples)
            return batch

        return fetch

    def load(self, content: Sequence[int], samples: int) -> None:
        """A micro-batch of `samples` samples; `content` identifies it."""
        self._content, self._samples = zlib.crc32(array("q", content).tobytes()), samples

    def begin(self) -> None:
        """The script is given the micro-batch that was loaded."""
        self._deadline = time.monotonic() + self._samples / self._rate

    def wait(self) -> None:
        """Until the micro-batch has taken its time. A loss through no tracked module has not waited in backward."""
        left = self._deadline - time.monotonic()
        if left > 0:
            time.sleep(left)

    def gradient(self, module: int, number: int, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient of one parameter for the loaded micro-batch: one number between -1 and 1, repeated."""
        mixed = zlib.crc32(array("q", (module, number)).tobytes(), self._content)
        return torch.full_like(parameter, mixed / 2**31 - 1.0)


class _Forward:
    """Stands in for a module's forward."""

    def __init__(self, device: PacedDevice, number: int, name: str, module: nn.Module) -> None:
        self._device, self._number, self._name, self._module = device, number, name, module
        self._shell = _Shell(module, module.forward)
        self._known: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = repr((_each(_described, args), _each(_described, kwargs), self._module.training))
        if key not in self._known:
            self._known[key] = self._shapes(args, kwargs)
        inputs: list[torch.Tensor] = []
        _each(inputs.append, [args, kwargs])
        likes: list[torch.Tensor] = []
        _each(likes.append, self._known[key])
        parameters = list(self._module.parameters())
        results = iter(
            _StandIn.apply(self._device, self._number, likes, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
        )
        return _each(lambda _: next(results), self._known[key])

    def _shapes(self, args: Any, kwargs: Any) -> Any:
        """What the module returns, as tensors without memory. Buffers and random streams stay unchanged."""
        streams = Streams()
        before = streams.save()
        state = {name: tensor.to("meta") for name, tensor in self._shell.state()}
        try:
            with torch.no_grad(), torch.device("meta"):
                found = functional_call(self._shell, state, _each(_on_meta, args), _each(_on_meta, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise UsageError(
                f"a paced device cannot find out what {self._name!r} returns: its forward does not run on torch's meta device "
                f"({str(error).splitlines()[0]}); pace a script whose tracked modules do not look at values"
            ) from error
        finally:
            streams.exchange(before)
        tensors: list[torch.Tensor] = []
        _each(tensors.append, found)
        if not tensors:
            raise UsageError(
                f"a paced device cannot stand in for {self._name!r}: its forward returns a {type(found).__name__}; tensors, "
                "and tuples, lists and dicts of them, are known"
            )
        return found


class _Shell(nn.Module):
    """The module with its own forward and without its hooks, to be called with other parameters."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = module
        self._forward = forward

    def state(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class _StandIn(torch.autograd.Function):
    """A module's place in the graph: zeros forward; backward, gradients that wait for the deadline."""

    @staticmethod
    def forward(
        ctx: Any,
        device: PacedDevice,
        module: int,
        likes: Sequence[torch.Tensor],
        inputs: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.device, ctx.module = device, module
        ctx.inputs, ctx.parameters = tensors[:inputs], tensors[inputs:]
        where = tensors[-1].device if len(tensors) > inputs else torch.device("cpu")
        results = tuple(torch.zeros_like(like, device=where) for like in likes)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4:]
        below = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip(ctx.inputs, wanted, strict=False)
        ]
        gradients = [
            ctx.device.gradient(ctx.module, number, parameter) if needed else None
            for number, (parameter, needed) in enumerate(
                zip(ctx.parameters, wanted[len(ctx.inputs) :], strict=True)
            )
        ]
        ctx.device.wait()
        return (None, None, None, None, *below, *gradients)


def _each(do: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with `do` applied to every tensor in it, in order."""
    if isinstance(tree, torch.Tensor):
        return do(tree)
    if isinstance(tree, dict):
        return type(tree)((key, _each(do, value)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_each(do, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_each(do, value) for value in tree)
    return tree


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")

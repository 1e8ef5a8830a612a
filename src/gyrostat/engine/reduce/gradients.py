"""The gradients of one tracked module: the content of `.grad`, which parameters take part in a pass, and the result.

To the script, `.grad` behaves as in a DDP rank. Every virtual worker's backward begins with what `.grad` held before the
pass (usually nothing), and after the pass it holds the mean over all N. A module that no backward used in a pass keeps its
`.grad`, as under DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from gyrostat.core.errors import Misuse, Refused
from gyrostat.core.placement import Placement
from gyrostat.engine.reduce.base import Reducer
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.torch_internals import copy_all
from gyrostat.engine.transport.group import WorkerGroup


@dataclass(frozen=True)
class ModuleParticipation:
    """How the virtual workers of one worker used a module in a pass; exchanged among workers before the reduction."""

    touched: int
    """The number of virtual workers whose backward used the module."""
    used: tuple[bool, ...] | None
    """For each parameter whether any virtual worker used it; None: all."""
    ready: tuple[int, ...] | None
    """The order in which virtual worker 0's gradients became ready, if it ran here and the order is wanted."""


@dataclass
class _PassState:
    before: list[torch.Tensor | None]
    """`.grad` of each parameter at the beginning: every virtual worker starts from it."""
    used: list[bool]
    """For each parameter whether a virtual worker here used it."""
    touched: int = 0
    ready: list[int] | None = None
    """The order in which virtual worker 0's gradients became ready, if it is recorded."""

    def __post_init__(self) -> None:
        self.dirty = any(gradient is not None for gradient in self.before)


@dataclass
class _RankState:
    """The virtual worker that runs now, or ran last."""

    rank: int = -1
    weight: float | None = None
    """Its share of the samples, if not 1/N."""
    last_here: bool = False
    may_stream: bool = False
    """Its gradients may be handed over one by one."""
    streams: bool = False
    """They are being handed over so."""
    watching: bool = False
    """Whether `_became_ready` takes note of gradients."""
    seen: set[int] = field(default_factory=set)
    """Gradients that became ready."""
    started: list[tuple[torch.Tensor, int] | None] = field(default_factory=list)
    """`.grad` of each parameter with its version, where the pass began with gradients."""


class ModuleGradients:
    """One module with trainable parameters: a DDP instance in plain PyTorch."""

    reduction: Reducer

    def __init__(self, name: str, module: nn.Module, options: DdpOptions, *, overlap: bool) -> None:
        self.name, self.options = name, options
        self.names, self.parameters, self._frozen = split_parameters(module)
        self._own: list[torch.Tensor | None] = []  # of the last virtual worker here
        self._in_bucket = [False] * len(self.parameters)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._pass = self._new_pass([])
        self._rank = _RankState()
        self.overlap(overlap)

    def overlap(self, wanted: bool) -> None:
        """Whether buckets are reduced while backward runs."""
        # With unused parameters it is not known before the end of backward when a bucket is complete.
        self._overlaps = wanted and not self.options.tolerates_unused

    def begin_pass(self) -> None:
        """Remember what `.grad` holds: every virtual worker starts from it."""
        self._pass = self._new_pass(self._gradients())

    def _new_pass(self, before: list[torch.Tensor | None]) -> _PassState:
        return _PassState(before, [False] * len(self.parameters))

    def begin_rank(self, rank: int, *, weight: float | None, last_here: bool) -> None:
        """Virtual worker `rank` begins: set `.grad` as it was before the pass. `weight`: its share, if not 1/N."""
        # A hook that the script registered after ours would change the gradient after it has been handed over.
        may_stream = last_here and self._overlaps and not self._has_foreign_hooks()
        self._rank = _RankState(rank, weight, last_here, may_stream)
        if not self._pass.dirty:
            return
        for parameter, before in zip(self.parameters, self._pass.before, strict=True):
            parameter.grad = None if before is None else before.clone()
            self._rank.started.append(
                None if parameter.grad is None else (parameter.grad, parameter.grad._version)
            )

    def begin_last_micro_batch(self) -> None:
        """Gradients that become ready from now on are final for this virtual worker."""
        recording = self._rank.rank == 0 and self.reduction.wants_ready_order()
        if recording:
            self._pass.ready = []
        self._rank.watching = self._rank.may_stream or recording
        if not self._hooks and (self._overlaps or recording):
            for number, parameter in enumerate(self.parameters):
                hook = parameter.register_post_accumulate_grad_hook(partial(self._became_ready, number))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def before_backward(self, *, first: bool) -> None:
        """Check `.grad` as backward finds it. `first`: this virtual worker has accumulated nothing in this pass."""
        if self.options.gradient_as_bucket_view and first:
            self._in_bucket = [parameter.grad is not None for parameter in self.parameters]
        if first and not self._pass.dirty and any(gradient is not None for gradient in self._gradients()):
            raise Misuse(
                f"{self.name!r} has gradients before step.backward(loss) in a micro-batch of virtual worker {self._rank.rank}: "
                "a backward() of the script's own? DDP would reduce it by itself; add the losses and call step.backward once"
            )

    def _became_ready(self, number: int, parameter: torch.Tensor) -> None:
        """The gradient of this parameter is complete. Called by autograd in the middle of backward, in its thread."""
        current = self._rank
        if not current.watching or (gradient := parameter.grad) is None:
            return
        if number in current.seen:
            if self.options.static_graph:
                return
            raise Misuse(
                f"parameter {self.names[number]!r} of {self.name!r} became ready twice in one backward (reentrant "
                "checkpointing?); DDP refuses that too. Track with ddp={'static_graph': True}"
            )
        current.seen.add(number)
        if self._pass.ready is not None and current.rank == 0:
            self._pass.ready.append(number)
        if current.may_stream and gradient.layout is torch.strided:
            if not current.streams:
                current.streams = True
                self.reduction.stream(current.rank, self._divides(), current.weight)
            self.reduction.ready(number, _without_graph(gradient))

    def end_rank(self) -> None:
        """Backward is over: hand over the gradients that have not been streamed, and clear `.grad`."""
        current = self._rank
        current.watching = False
        if not self._overlaps:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        gradients = self._gradients()
        used = self._used_by(gradients)
        if any(used):
            self._check(current.rank, gradients, used)
            self._pass.touched += 1
            if self.options.tolerates_unused:
                self._pass.used = [a or b for a, b in zip(self._pass.used, used, strict=True)]
            if current.last_here:
                self._own = gradients
        if not current.streams and (any(used) or self.options.tolerates_unused):
            with torch.no_grad():
                self.reduction.take(current.rank, gradients, self._divides(), current.weight)
        for parameter in self.parameters:
            parameter.grad = None

    def _gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.parameters]

    def _divides(self) -> list[bool]:
        """DDP divides instead of multiplying where the gradient already lives in its bucket."""
        return self._in_bucket if self.options.gradient_as_bucket_view else [False] * len(self.parameters)

    def part(self) -> ModuleParticipation:
        """This worker's participation, after its last virtual worker."""
        return ModuleParticipation(
            touched=self._pass.touched,
            used=tuple(self._pass.used) if self.options.tolerates_unused else None,
            ready=self._ready_order() if self._pass.ready is not None and self._pass.touched else None,
        )

    def send_off(self, hosted: int) -> None:
        """Begin to reduce, if all `hosted` virtual workers used the module.

        If those of another worker did not, the exchange that follows finds that out before anything waits.
        """
        if self._overlaps and self._pass.touched == hosted:
            self.reduction.send_off()

    def complete(self, parts: Sequence[ModuleParticipation], virtual_workers: int) -> None:
        """Wait for the sum, if any backward used the module. `parts`: those of all workers."""
        touched = sum(part.touched for part in parts)
        if 0 < touched < virtual_workers and not self.options.tolerates_unused:
            raise Misuse(
                f"{touched} of {virtual_workers} virtual workers ran a backward through {self.name!r}, the others did not: "
                "DDP would wait forever; make every micro-batch use it, or track it with ddp={'find_unused_parameters': True}"
            )
        if touched > 0:
            self.reduction.complete()

    def retake(self, placement: Placement, group: WorkerGroup) -> None:
        """A worker is lost: reduce the gradients of this pass among the workers that are left."""
        if not self.reduction.retake(placement, group) and self._own:
            with torch.no_grad():
                self.reduction.take(self._rank.rank, self._own, self._divides(), self._rank.weight)

    def leave_out(self, rank: int) -> None:
        """Let virtual worker `rank`, which was lost, add nothing to this pass."""
        if self._pass.touched:
            nothing = [None] * len(self.parameters)
            with torch.no_grad():
                self.reduction.take(rank, nothing, [False] * len(nothing), 0.0)
            self._pass.touched += 1

    def scale(self, factor: float) -> None:
        """Scale `.grad` after a pass from which virtual workers were left out."""
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def settle(self, parts: Sequence[ModuleParticipation]) -> None:
        """Set `.grad`, now that the sum is complete. `parts`: those of all workers."""
        if not any(part.touched for part in parts):
            self.reduction.discard()
            self._put_back([True] * len(self.parameters))
            return
        used = self._used_anywhere(parts)
        means = self.reduction.mean()
        own, self._own = self._own or [None] * len(means), []
        set_: list[torch.Tensor] = []
        to: list[torch.Tensor] = []
        for parameter, mean, mine, is_used in zip(self.parameters, means, own, used, strict=True):
            if is_used:
                # As in DDP, `.grad` is memory of its own that the script may keep or change.
                parameter.grad = torch.empty_like(parameter) if mine is None else _without_graph(mine)
                if mine is not mean:
                    set_.append(parameter.grad)
                    to.append(mean)
        copy_all(set_, to)
        self._put_back([not is_used for is_used in used])
        self.reduction.close_pass(next((part.ready for part in parts if part.ready is not None), None))

    def _used_anywhere(self, parts: Sequence[ModuleParticipation]) -> list[bool]:
        """For each parameter whether any virtual worker of the job used it."""
        reported = [part.used for part in parts if part.touched]
        if None in reported:
            return [True] * len(self.parameters)
        return [any(flags) for flags in zip(*(used for used in reported if used is not None), strict=True)]

    def _has_foreign_hooks(self) -> bool:
        hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self.parameters)
        return any(len(registered) > 1 for registered in hooks if registered)

    def _ready_order(self) -> tuple[int, ...]:
        """The order as DDP's reducer has it: parameters that a static graph does not use follow all others."""
        ready = self._pass.ready or []
        seen = set(ready)
        return (*ready, *(number for number in range(len(self.parameters)) if number not in seen))

    def _put_back(self, which: Sequence[bool]) -> None:
        for parameter, before, wanted in zip(self.parameters, self._pass.before, which, strict=True):
            if wanted:
                parameter.grad = before
        self._pass.before = []

    def _used_by(self, gradients: Sequence[torch.Tensor | None]) -> list[bool]:
        if not self._rank.started:
            return [gradient is not None for gradient in gradients]
        return [
            gradient is not None
            and (start is None or gradient is not start[0] or gradient._version != start[1])
            for gradient, start in zip(gradients, self._rank.started, strict=True)
        ]

    def _check(self, rank: int, gradients: Sequence[torch.Tensor | None], used: Sequence[bool]) -> None:
        if not all(used) and not self.options.tolerates_unused:
            unused = [name for name, is_used in zip(self.names, used, strict=True) if not is_used]
            raise Misuse(
                f"{_some(unused)} of {self.name!r} got no gradient in the micro-batch of virtual worker {rank}; "
                "if that is meant, track with ddp={'find_unused_parameters': True} as you would for DDP"
            )
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise Refused(
                    f"parameter {name!r} of {self.name!r} has a sparse gradient, which gloo adds in no fixed order; "
                    "use dense gradients (sparse=False)"
                )
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise Misuse(
                    f"parameter {name!r} of {self.name!r} was frozen at job.track but has a gradient now; DDP would not "
                    "reduce it. Call job.track while it requires a gradient, and freeze it afterwards"
                )


def _without_graph(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient has a graph after a backward with `create_graph`."""
    return gradient.detach() if gradient.requires_grad else gradient


def split_parameters(
    module: nn.Module,
) -> tuple[list[str], list[nn.Parameter], list[tuple[str, nn.Parameter]]]:
    """Trainable parameters in DDP's order, each once, with their names; and the frozen ones."""
    names: list[str] = []
    parameters: list[nn.Parameter] = []
    frozen: list[tuple[str, nn.Parameter]] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            names.append(name)
            parameters.append(parameter)
        else:
            frozen.append((name, parameter))
    return names, parameters, frozen


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    noun = "parameter" if len(names) == 1 else "parameters"
    return f"{noun} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")

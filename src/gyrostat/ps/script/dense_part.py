"""`DensePart`: the parameters of a tracked module as one flat row of numbers, which is what servers hold.

Parameters and gradients become views of two flat buffers: a pull is one copy into the first, a push is one copy of the second.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gyrostat.core.errors import Misuse, Refused
from gyrostat.engine.script.checks import check_module
from gyrostat.ps.store.hashing import Rows
from gyrostat.ps.store.optimizers import AnyOptimizer, RowAdagrad
from gyrostat.ps.store.spec import DenseSpec


class DensePart:
    """One tracked module."""

    def __init__(self, name: str, module: nn.Module, optimizer: AnyOptimizer, slots: int) -> None:
        _check(name, module, optimizer)
        self.name, self.module = name, module
        named = [(path, each) for path, each in module.named_parameters() if each.requires_grad]
        self.parameters = [each for _, each in named]
        self.spec = DenseSpec(
            name=name,
            size=sum(each.numel() for each in self.parameters),
            optimizer=optimizer,
            parameters=tuple((path, tuple(each.shape)) for path, each in named),
        )
        padded = self.spec.piece(slots) * slots
        self._slots = slots
        self._values, self._gradients = torch.zeros(padded), torch.zeros(padded)
        self._grad_views = []
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            view = self._values[start:stop].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            self._grad_views.append(self._gradients[start:stop].view(parameter.shape))
            start = stop
        self._buffers = [(path, each, each._version) for path, each in module.named_buffers()]

    @property
    def values(self) -> Rows:
        """As they are now, one row per slot."""
        return _rows(self._values, self._slots).copy()

    def install(self, values: Rows) -> None:
        """Values from the servers. Gradients are 0 from now on."""
        np.copyto(_rows(self._values, self._slots), values)
        self._gradients.zero_()
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            parameter.grad = view

    def gradients(self) -> Rows:
        """One row per slot, a copy."""
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
        for path, buffer, version in self._buffers:
            if buffer._version != version:
                raise Refused(
                    f"buffer {self.name}.{path} has changed in training: workers of a job with servers keep nothing between "
                    "batches, so it would differ among them; use a module without such buffers (LayerNorm, GroupNorm)"
                )
        return _rows(self._gradients, self._slots).copy()


def _rows(flat: torch.Tensor, slots: int) -> Rows:
    rows: Rows = flat.numpy().reshape(slots, -1)
    return rows


def _check(name: str, module: nn.Module, optimizer: AnyOptimizer) -> None:
    if not isinstance(module, nn.Module):
        raise Misuse(f"servers.track({name}=…) needs a module, got a {type(module).__name__}")
    check_module(name, module)
    if isinstance(optimizer, RowAdagrad):
        raise Refused(
            f"servers.track({name}=…, optimizer=RowAdagrad(…)): a dense tensor has no rows on servers; use Adagrad"
        )
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise Refused(
                f"{name}.{path} is a {type(part).__name__}, whose running statistics change in training: workers of a job with "
                "servers keep nothing between batches; use LayerNorm or GroupNorm"
            )
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        raise Misuse(f"servers.track({name}=…): the module has no parameters that are trained")
    for parameter in parameters:
        if parameter.dtype is not torch.float32 or parameter.device.type != "cpu":
            raise Refused(
                f"servers.track({name}=…): parameters on servers are float32 on the CPU, got {parameter.dtype} on "
                f"{parameter.device}"
            )

"""What the script has handed over to the job: modules, optimizers, schedulers, scalers, and the values in `job.state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gyrostat.core.errors import Misuse
from gyrostat.engine.script.checks import check_module, check_optimizer, check_separate, check_trackable


class Tracked:
    """The tracked objects of one job, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.modules: dict[str, nn.Module] = {}
        """Those of them that are modules."""
        self.state: dict[str, Any] = {}
        """`job.state`."""

    def add(self, objects: Mapping[str, Any]) -> dict[str, nn.Module]:
        """Check and keep these objects. Returns the modules among them."""
        modules = {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}
        for name, thing in objects.items():
            if name in self.objects:
                raise Misuse(f"job.track({name}=…) twice; give every tracked object a name of its own")
            check_trackable(name, thing)
        for name, module in modules.items():
            check_module(name, module)
        check_separate(self.modules | modules)
        for name, thing in objects.items():
            if isinstance(thing, Optimizer):
                check_optimizer(name, thing, self.modules | modules)
        self.objects |= objects
        self.modules |= modules
        return modules

    def name_of(self, optimizer: Optimizer) -> str | None:
        return next((name for name, thing in self.objects.items() if thing is optimizer), None)

    def set_state(self, state: dict[str, Any]) -> None:
        """Replace `job.state`, as a checkpoint restores it."""
        self.state = state

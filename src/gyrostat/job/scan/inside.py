"""In the worker: runs the user's program, measures the time of its steps, and then profiles some more.

`python -m gyrostat.job.scan.inside ORDERS` with the orders as JSON. The watcher wraps the job's supervisor, so
it is called at every boundary. Operators come from torch's profiler. The module of an operator comes from a mark around every
module's forward, and for backward from the sequence number that autograd gives to both.
"""

from __future__ import annotations

import bisect
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.modules import module as hooks

from gyrostat.engine.numerics.determinism import cpu_type
from gyrostat.engine.script import session
from gyrostat.engine.supervisor import Supervisor
from gyrostat.job import environment
from gyrostat.job.processes.worker import run_program
from gyrostat.job.scan.measured import Measured, Orders
from gyrostat.job.scan.turns import TurnTaking

_TURN_S = 0.02
_MARK = "gyrostat module "
_BACKWARD = "autograd::engine::evaluate_function"
_UPDATE = "Optimizer."
_BOUNDARY = "gyrostat boundary"
_ELSEWHERE = "(elsewhere)"


Times = dict[str, float]


class BoundaryWatcher:
    """A supervisor that measures between boundaries, and forwards every call."""

    def __init__(self, orders: Orders, inner: Supervisor) -> None:
        self._orders, self._inner = orders, inner
        self._turns = TurnTaking(Path(orders.directory), orders.level, orders.other)
        self._marks = Marks()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._steps = 0
        self._measured: list[float] = []
        self._began, self._steps_before = 0.0, 0

    def stepped(
        self, step: int, epoch: int, loss: float | None, samples: int, busy: Sequence[float] = ()
    ) -> None:
        orders = self._orders
        self._steps += 1
        timed = self._steps - orders.warm_up
        if timed == 0:
            self._next_turn()
        elif 0 < timed <= orders.timed:
            self._maybe_end_turn(last=timed == orders.timed)
        if timed == orders.timed:
            self._marks.put()
            self._profiler.start()
        elif orders.timed < timed <= orders.timed + orders.profiled:
            with torch.autograd.profiler.record_function(_BOUNDARY):
                pass
        if self._steps == orders.steps:
            self._profiler.stop()
            self._marks.remove()
            self._turns.leave()
            self._write()
        self._inner.stepped(step, epoch, loss, samples, busy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _maybe_end_turn(self, *, last: bool) -> None:
        now = time.thread_time()
        if now - self._began >= _TURN_S or last:
            self._measured.append((now - self._began) / (self._steps - self._steps_before))
            self._next_turn()

    def _next_turn(self) -> None:
        self._turns.pass_on()
        self._began, self._steps_before = time.thread_time(), self._steps

    def _write(self) -> None:
        operators, modules = attribute(self._profiler.events())  # type: ignore[no-untyped-call]
        measured = Measured(
            cpu_type=cpu_type(environment.variables()),
            turns=self._measured,
            operators=_medians(operators),
            modules=_medians(modules),
        )
        self._orders.result.write_bytes(msgspec.json.encode(measured))


class Marks:
    """Marks in the profile around every module's forward, between `put` and `remove`."""

    def __init__(self) -> None:
        self._open: list[torch.autograd.profiler.record_function] = []
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}

    def put(self) -> None:
        job = session.current()
        for name, thing in ({} if job is None else job.tracked).items():
            if isinstance(thing, nn.Module):
                for path, module in thing.named_modules(prefix=name):
                    self._names[id(module)] = f"{path} ({type(module).__name__})"
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module), f"({type(module).__name__})")
        mark = torch.autograd.profiler.record_function(_MARK + name)
        mark.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(mark)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def attribute(events: Any) -> tuple[list[Times], list[Times]]:
    """Seconds of operators' self time, by operator and by module, for every step."""
    owners: dict[int, str] = {}
    boundaries = []
    for event in events:
        if event.sequence_nr >= 0 and (owner := _owner(event, None)) is not None:
            owners[event.sequence_nr] = owner
        if event.name == _BOUNDARY:
            boundaries.append(event.time_range.start)
    boundaries.sort()
    operators: list[Times] = [defaultdict(float) for _ in boundaries]
    modules: list[Times] = [defaultdict(float) for _ in boundaries]
    for event in events:
        step = bisect.bisect(boundaries, event.time_range.start)
        if step < len(boundaries) and not event.name.startswith((_MARK, _BACKWARD, _UPDATE)):
            seconds = event.self_cpu_time_total / 1e6
            operators[step][event.name.removeprefix("aten::")] += seconds
            modules[step][_owner(event, owners) or _ELSEWHERE] += seconds
    return operators, modules


def _medians(steps: list[Times]) -> dict[str, float]:
    """The median over steps, so that a step disturbed by other load does not count."""
    names = {name for step in steps for name in step}
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def _owner(event: Any, owners: dict[int, str] | None) -> str | None:
    """The innermost module around an event; for a backward event, that of its forward, or None."""
    while event is not None:
        if event.name.startswith(_MARK):
            return str(event.name.removeprefix(_MARK))
        if event.name.startswith(_UPDATE):
            return "(update)"
        if event.name.startswith(_BACKWARD):
            return None if owners is None else owners.get(event.sequence_nr)
        event = event.cpu_parent
    return _ELSEWHERE


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    session.supervise(lambda inner: BoundaryWatcher(orders, inner))
    run_program(orders.program)


if __name__ == "__main__":
    main()

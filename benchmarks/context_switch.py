"""The share of a step that goes into switching between virtual workers: eight of them on one worker, dropout and batch-norm.

Switching is the exchange of random streams and the saving and restoring of buffers; handing gradients over is not part
of it. Measured twice. Once with a clock around the engine's own methods that do it. And once from outside, as EasyScale
(§5.1.2) did: steps with switching and steps in which these methods do nothing take turns, one by one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

import gyrostat
from figures import Figure, Options, Target, main
from gyrostat.data.rng import RngState, Streams
from gyrostat.engine.training.buffers import ModuleBuffers
from pairs import Pair, show_progress
from workloads import SEED, Workload, resnet

VIRTUAL_WORKERS = 8
TARGET = Target(at_most=0.01)
WARM_UP_STEPS = 5
STEPS_PER_PAIR = 4  # with switching, and as many without


class Switching:
    """The engine's methods that switch, with a clock around them, and an off switch."""

    def __init__(self) -> None:
        self.on = True
        self.seconds = 0.0
        for name in ("begin_pass", "enter", "micro_batch", "leave", "end_pass"):
            self._replace(ModuleBuffers, name, lambda buffers: None)
        for name in ("_before_forward", "_after_forward"):
            self._replace(ModuleBuffers, name, lambda buffers: None)
        self._replace(Streams, "exchange", _in_force)

    def _replace(self, owner: type, name: str, nothing: Callable[[Any], Any]) -> None:
        """From now on `owner.name` is timed, and is `nothing` while switching is off."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def switch(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return nothing(self_)
            began = time.perf_counter()
            try:
                return original(self_, *args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, switch)


def _in_force(streams: Streams) -> RngState:
    """What stands for the streams that were in force, without looking at them."""
    return streams._installed


def measure(options: Options) -> list[Figure]:
    switching = Switching()
    steps = training(resnet_with_dropout())
    for _ in range(WARM_UP_STEPS):
        next(steps)
    inside, outside = [], []
    for pair in range(options.pairs):
        seconds = {True: 0.0, False: 0.0}
        switching.seconds = 0.0
        for number in range(2 * STEPS_PER_PAIR):
            switching.on = (number + pair) % 2 == 0
            began = time.perf_counter()
            next(steps)
            seconds[switching.on] += time.perf_counter() - began
        inside.append(_per_step(switching.seconds, seconds[True]))
        outside.append(_per_step(seconds[True] - seconds[False], seconds[True]))
        show_progress(pair + 1, options.pairs, f"{inside[-1].ours:.3f} ms of {inside[-1].theirs:.1f} ms")
    return [
        Figure(
            name=f"ResNet with dropout, N={VIRTUAL_WORKERS} on one worker: time inside the switch",
            ours="switching",
            theirs="step",
            unit="ms",
            pairs=inside,
            target=TARGET,
            percent=True,
        ),
        Figure(
            name="the same from outside: steps with switching less steps without",
            ours="difference",
            theirs="step",
            unit="ms",
            pairs=outside,
            percent=True,
        ),
    ]


def resnet_with_dropout() -> Workload:
    """The example's model, with dropout in front of its classifier and of every stage."""
    work = resnet()
    for name in ("stages", "classifier"):
        setattr(work.model, name, nn.Sequential(nn.Dropout(0.1), getattr(work.model, name)))
    return work


def training(work: Workload) -> Iterator[None]:
    """An endless training, one step at a time."""
    job = gyrostat.init(seed=SEED, virtual_workers=VIRTUAL_WORKERS)
    train = job.dataloader(work.dataset, batch_size=work.batch_size, shuffle=True, drop_last=True)
    job.track(model=work.model, optimizer=work.optimizer)
    for _ in job.epochs(1_000_000):
        for step in job.steps(train):
            for batch in step:
                step.backward(work.loss(work.model, batch))
            work.update()
            yield


def _per_step(ours: float, theirs: float) -> Pair:
    return Pair(1000 * ours / STEPS_PER_PAIR, 1000 * theirs / STEPS_PER_PAIR)


if __name__ == "__main__":
    main(__doc__ or "", measure)

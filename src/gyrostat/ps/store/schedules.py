"""Learning rates by the number of updates that a slot has applied, the first of which is number 1. Pure.

A number stands for a constant rate. With asynchronous workers there is no common step: every slot counts the updates it
has applied.
"""

from __future__ import annotations

import math

import msgspec

from gyrostat.core.errors import UsageError


class Warmup(msgspec.Struct, frozen=True, tag=True):
    """From 0 to `lr` over `updates`, then constant."""

    lr: float
    updates: int

    def at(self, update: int) -> float:
        return self.lr * min(1.0, update / self.updates)


class ExponentialDecay(msgspec.Struct, frozen=True, tag=True):
    """`lr` times `factor` to the power of update/`every`; in steps if `staircase`."""

    lr: float
    factor: float
    every: int
    staircase: bool = False

    def at(self, update: int) -> float:
        power = (update - 1) // self.every if self.staircase else (update - 1) / self.every
        return self.lr * self.factor**power


class InverseTimeDecay(msgspec.Struct, frozen=True, tag=True):
    """`lr` / (1 + (update-1)·`decay`): torch's `lr_decay` of Adagrad."""

    lr: float
    decay: float

    def at(self, update: int) -> float:
        return self.lr / (1 + (update - 1) * self.decay)


class CosineDecay(msgspec.Struct, frozen=True, tag=True):
    """From `lr` to `final` over `updates` along a half cosine, after `warmup` updates from 0; then constant."""

    lr: float
    updates: int
    warmup: int = 0
    final: float = 0.0

    def at(self, update: int) -> float:
        if update <= self.warmup:
            return self.lr * update / self.warmup
        done = min(1.0, (update - 1 - self.warmup) / max(1, self.updates - self.warmup))
        return self.final + (self.lr - self.final) * (1 + math.cos(math.pi * done)) / 2


Schedule = Warmup | ExponentialDecay | InverseTimeDecay | CosineDecay


def rate_at(lr: float | Schedule, update: int) -> float:
    """The learning rate of update number `update`, counted from 1."""
    return lr if isinstance(lr, float | int) else lr.at(update)


def check_rate(lr: float | Schedule) -> None:
    if isinstance(lr, float | int):
        if not lr > 0:
            raise UsageError(f"lr must be more than 0, got {lr!r}")
        return
    for name in ("lr", "updates", "every", "factor"):
        value = getattr(lr, name, 1)
        if not value > 0:
            raise UsageError(f"{name} of {type(lr).__name__} must be more than 0, got {value!r}")

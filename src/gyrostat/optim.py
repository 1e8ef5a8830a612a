"""Optimizers and learning-rate schedules of parameters that are on servers (`gyrostat.servers`). Imports no torch."""

from __future__ import annotations

from gyrostat.ps.store.optimizers import FTRL, SGD, Adagrad, Adam, RowAdagrad
from gyrostat.ps.store.schedules import CosineDecay, ExponentialDecay, InverseTimeDecay, Warmup

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "CosineDecay",
    "ExponentialDecay",
    "InverseTimeDecay",
    "RowAdagrad",
    "Warmup",
]

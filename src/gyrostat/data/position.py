"""The position of a virtual worker in a loader: plain values, part of its context, from which any worker can resume.

Data workers run ahead of training. A position describes what has been consumed, never what has been prefetched: every
prefetched batch brings the state after it, and consuming the batch commits that state. So a position belongs to a boundary,
and batches in flight are made again, with the same bits, by the worker that resumes.

The keys of `to_tree` are part of the checkpoint's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gyrostat.data.dataset_replica import ReplicaState
from gyrostat.data.rng import RngState


@dataclass(frozen=True, kw_only=True)
class DataWorkerState:
    """Data worker j of virtual worker r, between two batches."""

    rng: RngState
    replica: ReplicaState | None = None
    """The state of its copy of the dataset."""
    batches: int = 0
    """How many batches it has made in this iteration."""
    ended: bool = False
    """Its iterable dataset is exhausted in this iteration."""
    origin: tuple[RngState, ReplicaState | None] | None = None
    """Of persistent data workers: streams and replica when this iteration began."""

    def to_tree(self) -> dict[str, Any]:
        return {
            "rng": self.rng.to_tree(),
            "held": self.replica,
            "batches": self.batches,
            "ended": self.ended,
            "origin": None if self.origin is None else [self.origin[0].to_tree(), self.origin[1]],
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> DataWorkerState:
        origin = tree["origin"]
        return cls(
            rng=RngState.from_tree(tree["rng"]),
            replica=tree["held"],
            batches=tree["batches"],
            ended=tree["ended"],
            origin=None if origin is None else (RngState.from_tree(origin[0]), origin[1]),
        )


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """A sampler of the user: its state when the iteration began, and how many indices it has given since."""

    replica: ReplicaState | None = None
    rng: RngState | None = None
    generator: torch.Tensor | None = None
    taken: int = 0
    """Indices taken, whether consumed or not."""
    ahead: tuple[Any, ...] | None = None
    """Indices taken and not consumed yet. None: they are no plain values, and are taken again from the sampler."""

    def to_tree(self) -> dict[str, Any]:
        return {
            "held": self.replica,
            "rng": None if self.rng is None else self.rng.to_tree(),
            "generator": self.generator,
            "asked": self.taken,
            "ahead": None if self.ahead is None else list(self.ahead),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> SamplerState:
        rng = None if tree["rng"] is None else RngState.from_tree(tree["rng"])
        ahead = None if tree["ahead"] is None else tuple(tree["ahead"])
        return cls(
            replica=tree["held"], rng=rng, generator=tree["generator"], taken=tree["asked"], ahead=ahead
        )


@dataclass(frozen=True, kw_only=True)
class Position:
    """One virtual worker in one loader."""

    base_seed: int | None = None
    """The seed of its data workers."""
    consumed: int = 0
    """Micro-batches consumed in this iteration."""
    turn: int = 0
    """The data worker that makes the next batch."""
    data_workers: Mapping[int, DataWorkerState] = field(default_factory=dict)
    """By number. One that has made no batch is missing: its state follows from the base seed."""
    generator: torch.Tensor | None = None
    """The state of the loader's `generator`."""
    sampler: SamplerState | None = None
    ahead: RngState | None = None
    """With `lookahead`: the streams under which the next batch was made; None: that drew nothing."""
    left_over: tuple[tuple[int, Any], ...] = ()
    """Of persistent data workers: requests in flight when the loop was left, as (data worker, index)."""

    def to_tree(self) -> dict[str, Any]:
        return {
            "base_seed": self.base_seed,
            "consumed": self.consumed,
            "turn": self.turn,
            "pairs": {number: state.to_tree() for number, state in self.data_workers.items()},
            "generator": self.generator,
            "sampler": None if self.sampler is None else self.sampler.to_tree(),
            "ahead": None if self.ahead is None else self.ahead.to_tree(),
            "left_over": list(map(list, self.left_over)),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Position:
        return cls(
            base_seed=tree["base_seed"],
            consumed=tree["consumed"],
            turn=tree["turn"],
            data_workers={
                number: DataWorkerState.from_tree(state) for number, state in tree["pairs"].items()
            },
            generator=tree["generator"],
            sampler=None if tree["sampler"] is None else SamplerState.from_tree(tree["sampler"]),
            ahead=None if tree.get("ahead") is None else RngState.from_tree(tree["ahead"]),
            left_over=tuple((worker, index) for worker, index in tree["left_over"]),
        )

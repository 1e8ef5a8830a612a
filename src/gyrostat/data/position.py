"""Where a virtual worker stands in a loader: plain values, part of its context, that any worker can go on from.

Data workers run ahead of training. A position says what has been consumed, never what has been prepared: with every
prepared batch comes the state after it, and consuming the batch commits that state. So a position belongs to a boundary,
and what was in flight is prepared anew, to the same bits, by whoever goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gyrostat.data.dataset_replica import Held
from gyrostat.data.rng import RngState


@dataclass(frozen=True, kw_only=True)
class PairState:
    """Data worker j of virtual worker r, between two batches."""

    rng: RngState
    held: Held | None = None
    """What its copy of the dataset holds."""
    batches: int = 0
    """How many it has made in this iteration."""
    ended: bool = False
    """An iterable dataset has no more for it in this iteration."""
    origin: tuple[RngState, Held | None] | None = None
    """Persistent data workers: its streams, and what it held, when this iteration began."""

    def to_tree(self) -> dict[str, Any]:
        return {
            "rng": self.rng.to_tree(),
            "held": self.held,
            "batches": self.batches,
            "ended": self.ended,
            "origin": None if self.origin is None else [self.origin[0].to_tree(), self.origin[1]],
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> PairState:
        origin = tree["origin"]
        return cls(
            rng=RngState.from_tree(tree["rng"]),
            held=tree["held"],
            batches=tree["batches"],
            ended=tree["ended"],
            origin=None if origin is None else (RngState.from_tree(origin[0]), origin[1]),
        )


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """A sampler of the user's: the state it was in when the iteration began, and how often it was asked since."""

    held: Held | None = None
    rng: RngState | None = None
    generator: torch.Tensor | None = None
    asked: int = 0
    ahead: tuple[Any, ...] | None = None
    """What it gave that is not consumed yet. None: to be had by asking again, for it is no plain value."""

    def to_tree(self) -> dict[str, Any]:
        return {
            "held": self.held,
            "rng": None if self.rng is None else self.rng.to_tree(),
            "generator": self.generator,
            "asked": self.asked,
            "ahead": None if self.ahead is None else list(self.ahead),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> SamplerState:
        rng = None if tree["rng"] is None else RngState.from_tree(tree["rng"])
        ahead = None if tree["ahead"] is None else tuple(tree["ahead"])
        return cls(held=tree["held"], rng=rng, generator=tree["generator"], asked=tree["asked"], ahead=ahead)


@dataclass(frozen=True, kw_only=True)
class Position:
    """One virtual worker in one loader."""

    base_seed: int | None = None
    """What its data workers are seeded from."""
    consumed: int = 0
    """Micro-batches of this iteration."""
    turn: int = 0
    """The data worker whose batch comes next."""
    pairs: Mapping[int, PairState] = field(default_factory=dict)
    """By data worker. One that has made nothing yet is missing: it follows from the base seed."""
    generator: torch.Tensor | None = None
    """The state of the loader's `generator`."""
    sampler: SamplerState | None = None
    left_over: tuple[tuple[int, Any], ...] = ()
    """Persistent data workers: what they had been asked for when the loop was left (data worker, index)."""

    def to_tree(self) -> dict[str, Any]:
        return {
            "base_seed": self.base_seed,
            "consumed": self.consumed,
            "turn": self.turn,
            "pairs": {number: pair.to_tree() for number, pair in self.pairs.items()},
            "generator": self.generator,
            "sampler": None if self.sampler is None else self.sampler.to_tree(),
            "left_over": list(map(list, self.left_over)),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Position:
        return cls(
            base_seed=tree["base_seed"],
            consumed=tree["consumed"],
            turn=tree["turn"],
            pairs={number: PairState.from_tree(pair) for number, pair in tree["pairs"].items()},
            generator=tree["generator"],
            sampler=None if tree["sampler"] is None else SamplerState.from_tree(tree["sampler"]),
            left_over=tuple((worker, index) for worker, index in tree["left_over"]),
        )

"""The contexts of all virtual workers, as they were after the last pass, on every worker: none is lost with another.

What a pass has changed in the contexts of a worker travels in the envelope of its reduction. So whoever completes a reduction
has all contexts after it, and whoever does not still has those before: there is nothing to acknowledge, and one survivor is
enough. They stay as they came, in bytes, until somebody needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from gyrostat.data.rng import RngState, TwisterState
from gyrostat.engine import statetree
from gyrostat.engine.context import Context

_NOTHING = b""


class Twister(msgspec.Struct, frozen=True, array_like=True):
    raw: bytes
    normal: float | None


class Change(msgspec.Struct, frozen=True, array_like=True):
    """What is new in one context. None: as it was."""

    rank: int
    torch: bytes | None = None
    numpy: Twister | None = None
    python: Twister | None = None
    cuda: bytes | None = None
    rest: bytes | None = None
    """Buffers, `step.local` and data positions, as a tree; empty if there are none."""
    fetched: list[tuple[bytes, Twister, Twister]] | None = None
    """Of a step's first pass: the streams under which micro-batches 1, 2 … were fetched."""


@dataclass
class _Known:
    """One context: what was last told of it, or heard."""

    rng: RngState
    rest: bytes = _NOTHING
    fetched: list[RngState] = field(default_factory=list)

    def context(self) -> Context:
        if not self.rest:
            return Context(self.rng)
        tree = statetree.decode(self.rest)
        return Context.from_tree({"rng": self.rng.to_tree(), **tree})


class Backups:
    """What one worker knows of everybody's contexts."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._at_step: dict[int, _Known] = {}

    def hold(self, contexts: Sequence[Any]) -> None:
        """All contexts are known, as trees in order of rank: when a job begins or goes on, and at fences."""
        for rank, tree in enumerate(contexts):
            context = Context.from_tree(tree)
            self._known[rank] = _Known(context.rng, _rest(context))

    def begin_step(self) -> None:
        """A later pass over a step's micro-batches needs to know where they began."""
        self._at_step = dict(self._known)

    def of(self, rank: int) -> Context:
        return self._known[rank].context()

    def at_step(self, rank: int) -> Context:
        """As it was when the step began."""
        return self._at_step[rank].context()

    def fetched(self, rank: int) -> list[RngState]:
        """The streams under which the step's second, third … micro-batch was fetched in its first pass."""
        return self._known[rank].fetched

    def changes(
        self, contexts: Mapping[int, Context], fetched: Mapping[int, Sequence[RngState]] | None
    ) -> list[Change]:
        """What a pass has changed in the contexts of this worker."""
        return [
            self._change(rank, context, None if fetched is None else fetched[rank])
            for rank, context in contexts.items()
        ]

    def _change(self, rank: int, context: Context, fetched: Sequence[RngState] | None) -> Change:
        known, rng = self._known[rank], context.rng
        new_torch, new_numpy, new_python = rng.changed_since(known.rng)
        new_cuda = rng.cuda is not None and (
            known.rng.cuda is None or not torch.equal(rng.cuda, known.rng.cuda)
        )
        rest = _rest(context)
        return Change(
            rank,
            None if new_torch is None else _bytes(new_torch),
            None if new_numpy is None else _twister(new_numpy),
            None if new_python is None else _twister(new_python),
            _bytes(rng.cuda) if new_cuda and rng.cuda is not None else None,
            None if rest == known.rest else rest,
            None
            if fetched is None
            else [(_bytes(s.torch), _twister(s.numpy), _twister(s.python)) for s in fetched],
        )

    def take(self, changes: Iterable[Change]) -> None:
        """A pass is complete: this is what it has changed."""
        for change in changes:
            known = self._known[change.rank]
            streams = (
                None if change.torch is None else _tensor(change.torch),
                None if change.numpy is None else _state(change.numpy),
                None if change.python is None else _state(change.python),
            )
            rng = known.rng.changed(streams)
            if change.cuda is not None:
                rng = RngState(rng.torch, rng.numpy, rng.python, _tensor(change.cuda))
            fetched = known.fetched
            if change.fetched is not None:
                fetched = [
                    RngState(_tensor(torch_), _state(numpy), _state(python))
                    for torch_, numpy, python in change.fetched
                ]
            rest = known.rest if change.rest is None else change.rest
            self._known[change.rank] = _Known(rng, rest, fetched)


def _rest(context: Context) -> bytes:
    if not (context.buffers or context.local or context.data):
        return _NOTHING
    tree = context.to_tree()
    del tree["rng"]
    return statetree.encode(tree)


def _twister(state: TwisterState) -> Twister:
    return Twister(state.raw, state.normal)


def _state(twister: Twister) -> TwisterState:
    return TwisterState(twister.raw, twister.normal)


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy())

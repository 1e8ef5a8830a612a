"""Backups: every worker keeps the contexts of all virtual workers, as they were after the last pass.

What a pass has changed in the contexts of a worker travels in its report. So a worker that completes a reduction has all
contexts after it, and a worker that does not still has those before it: there is nothing to acknowledge, and one survivor is
enough. Backups stay encoded until a recovery needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from gyrostat.data.rng import RngState, TwisterState
from gyrostat.engine.state import statetree
from gyrostat.engine.training.context import Context

_NOTHING = b""
_Value = TypeVar("_Value")


class Twister(msgspec.Struct, frozen=True, array_like=True):
    raw: bytes
    normal: float | None


class ContextChange(msgspec.Struct, frozen=True, array_like=True):
    """What a pass has changed in one context; None: unchanged. A backup is a change with nothing unchanged."""

    rank: int
    torch: bytes | None = None
    numpy: Twister | None = None
    python: Twister | None = None
    cuda: bytes | None = None
    rest: bytes | None = None
    """Buffers, `step.local` and data positions, as a tree; empty if there are none."""
    fetched: list[tuple[bytes, Twister, Twister]] | None = None
    """Of a step's first pass: the streams under which micro-batches 1, 2 … were fetched."""


_CHANGES = msgspec.msgpack.Decoder(list[ContextChange])


class ContextBackups:
    """The contexts of all virtual workers of the job."""

    enabled = True

    def __init__(self) -> None:
        self._known: dict[int, ContextChange] = {}
        self._at_step: dict[int, ContextChange] = {}

    def hold(self, contexts: Sequence[Any]) -> None:
        """Keep these contexts, trees in order of rank: when a job begins or resumes, and at fences."""
        for rank, tree in enumerate(contexts):
            self._known[rank] = _all_of(rank, Context.from_tree(tree), fetched=[])

    def begin_step(self) -> None:
        """Remember the contexts for `at_step`: a later pass over the step's micro-batches needs them."""
        self._at_step = dict(self._known)

    def of(self, rank: int) -> Context:
        return _context(self._known[rank])

    def at_step(self, rank: int) -> Context:
        """The context as it was when the step began."""
        return _context(self._at_step[rank])

    def fetched(self, rank: int) -> list[RngState]:
        """The streams under which the step's second, third … micro-batch was fetched in its first pass."""
        return [_streams(*raw) for raw in self._known[rank].fetched or ()]

    def changes(
        self, contexts: Mapping[int, Context], fetched: Mapping[int, Sequence[RngState]] | None
    ) -> list[ContextChange]:
        """What a pass has changed in the contexts of the local virtual workers."""
        return [
            self._change(rank, context, None if fetched is None else fetched[rank])
            for rank, context in contexts.items()
        ]

    def _change(self, rank: int, context: Context, fetched: Sequence[RngState] | None) -> ContextChange:
        known, now = self._known[rank], _all_of(rank, context, fetched)
        return ContextChange(
            rank,
            _if_new(now.torch, known.torch),
            _if_new(now.numpy, known.numpy),
            _if_new(now.python, known.python),
            _if_new(now.cuda, known.cuda),
            _if_new(now.rest, known.rest),
            now.fetched,
        )

    def take(self, changes: Iterable[ContextChange]) -> None:
        """A pass is complete: apply its changes."""
        for change in changes:
            known = self._known[change.rank]
            self._known[change.rank] = ContextChange(
                change.rank,
                known.torch if change.torch is None else change.torch,
                known.numpy if change.numpy is None else change.numpy,
                known.python if change.python is None else change.python,
                known.cuda if change.cuda is None else change.cuda,
                known.rest if change.rest is None else change.rest,
                known.fetched if change.fetched is None else change.fetched,
            )


class NoBackups(ContextBackups):
    """The job does not recover from peers: nothing is kept."""

    enabled = False

    def hold(self, contexts: Sequence[Any]) -> None:
        pass

    def begin_step(self) -> None:
        pass


def encode_changes(changes: Sequence[ContextChange]) -> bytes:
    return msgspec.msgpack.encode(changes)


def decode_changes(payload: bytes) -> list[ContextChange]:
    return _CHANGES.decode(payload)


def _all_of(rank: int, context: Context, fetched: Sequence[RngState] | None) -> ContextChange:
    rng = context.rng
    return ContextChange(
        rank,
        *_raw(rng),
        None if rng.cuda is None else _bytes(rng.cuda),
        _rest(context),
        None if fetched is None else [_raw(streams) for streams in fetched],
    )


def _context(known: ContextChange) -> Context:
    assert known.torch is not None
    assert known.numpy is not None
    assert known.python is not None
    rng = _streams(known.torch, known.numpy, known.python, known.cuda)
    if not known.rest:
        return Context(rng)
    return Context.from_tree({"rng": rng.to_tree(), **statetree.decode(known.rest)})


def _if_new(now: _Value, known: _Value) -> _Value | None:
    return None if now == known else now


def _rest(context: Context) -> bytes:
    if not (context.buffers or context.local or context.data):
        return _NOTHING
    tree = context.to_tree()
    del tree["rng"]
    return statetree.encode(tree)


def _raw(rng: RngState) -> tuple[bytes, Twister, Twister]:
    return _bytes(rng.torch), _twister(rng.numpy), _twister(rng.python)


def _streams(torch_: bytes, numpy: Twister, python: Twister, cuda: bytes | None = None) -> RngState:
    return RngState(_tensor(torch_), _state(numpy), _state(python), None if cuda is None else _tensor(cuda))


def _twister(state: TwisterState) -> Twister:
    return Twister(state.raw, state.normal)


def _state(twister: Twister) -> TwisterState:
    return TwisterState(twister.raw, twister.normal)


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy())

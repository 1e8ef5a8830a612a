"""The random streams of torch, NumPy and Python, exchanged in microseconds.

A virtual worker owns one `RngState`. Streams are exchanged for every micro-batch, so the costs matter: torch 1 µs, Python
12 µs, NumPy 80 µs by their public calls, and several times that when training fills the caches. The Mersenne Twisters of NumPy
and Python are therefore copied as raw memory, whose layout is checked once against the public state; where it is not as
expected, and for NumPy's cached normal variate, the public calls are used.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_numpy_random: Any = np.random  # its stubs leave some functions out
_cuda: Any = torch.cuda
_WORDS = 624
_RAW = _WORDS * 4 + 4  # the key, then the position


@dataclass(frozen=True)
class TwisterState:
    """A Mersenne Twister: key and position as raw bytes, and the cached normal variate if there is one."""

    raw: bytes
    normal: float | None = None


@dataclass(frozen=True)
class RngState:
    """All streams of one virtual worker, or the shared ones."""

    torch: Tensor
    numpy: TwisterState
    python: TwisterState
    cuda: Tensor | None = None

    def to_tree(self) -> dict[str, Any]:
        return {
            "torch": self.torch,
            "numpy": {"raw": self.numpy.raw, "normal": self.numpy.normal},
            "python": {"raw": self.python.raw, "normal": self.python.normal},
            "cuda": self.cuda,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RngState:
        return cls(
            torch=tree["torch"],
            numpy=TwisterState(**tree["numpy"]),
            python=TwisterState(**tree["python"]),
            cuda=tree["cuda"],
        )

    def changed_since(self, before: RngState) -> tuple[Any, ...]:
        """The streams that differ from `before`, None for the others: most data workers draw from one of them."""
        return (
            None if torch.equal(self.torch, before.torch) else self.torch,
            None if self.numpy == before.numpy else self.numpy,
            None if self.python == before.python else self.python,
        )

    def changed(self, streams: tuple[Any, ...]) -> RngState:
        """This state with the streams that `changed_since` returned."""
        new_torch, new_numpy, new_python = streams
        return RngState(
            torch=self.torch if new_torch is None else new_torch,
            numpy=new_numpy or self.numpy,
            python=new_python or self.python,
            cuda=self.cuda,
        )


def seed_all(seed: int) -> None:
    """Seed all streams in force, as a DDP script would."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Streams:
    """The streams in force in this process. Remembers what it installed, to save only what has changed."""

    def __init__(self) -> None:
        self._installed = self.save()

    def save(self, *, known: RngState | None = None) -> RngState:
        """The streams as they are now. Parts that did not change since `known` was installed are shared with it."""
        return RngState(
            torch=torch.default_generator.get_state(),
            numpy=_numpy_state(None if known is None else known.numpy),
            python=_python_state(None if known is None else known.python),
            cuda=torch.cuda.get_rng_state() if _cuda.is_initialized() else None,
        )

    def exchange(self, incoming: RngState) -> RngState:
        """Put `incoming` in force; returns the streams that were."""
        outgoing = self.save(known=self._installed)
        torch.default_generator.set_state(incoming.torch)
        if incoming.numpy is not outgoing.numpy:
            _install_numpy(incoming.numpy, over=outgoing.numpy)
        if incoming.python is not outgoing.python:
            _install_python(incoming.python)
        if incoming.cuda is not None:
            torch.cuda.set_rng_state(incoming.cuda)
        self._installed = incoming
        return outgoing


def _numpy_state(known: TwisterState | None) -> TwisterState:
    memory = _numpy_memory()
    if memory is not None and known is not None and known.normal is None and memory.raw == known.raw:
        return known  # no cached normal then, and no word drawn since: none now
    _, key, position, has_normal, normal = np.random.get_state()
    raw = np.asarray(key, dtype=np.uint32).tobytes() + int(position).to_bytes(4, "little")
    return TwisterState(raw, float(normal) if has_normal else None)


def _install_numpy(state: TwisterState, *, over: TwisterState) -> None:
    memory = _numpy_memory()
    if memory is not None and state.normal is None and over.normal is None:
        memory.raw = state.raw
        return
    key = np.frombuffer(state.raw, dtype=np.uint32, count=_WORDS)
    position = int.from_bytes(state.raw[_WORDS * 4 :], "little")
    np.random.set_state(("MT19937", key, position, int(state.normal is not None), state.normal or 0.0))


def _python_state(known: TwisterState | None) -> TwisterState:
    if _python_memory is not None:
        # In memory the position comes first; in a state it comes last, as NumPy has it.
        memory, normal = _python_memory.raw, _python.gauss_next
        raw = memory[4:] + memory[:4]
        if known is not None and raw == known.raw and normal == known.normal:
            return known
        return TwisterState(raw, normal)
    _, words, normal = random.getstate()
    return TwisterState(_packed(words), normal)


def _install_python(state: TwisterState) -> None:
    if _python_memory is not None:
        _python_memory.raw = state.raw[-4:] + state.raw[:-4]
        _python.gauss_next = state.normal
    else:
        random.setstate((3, tuple(np.frombuffer(state.raw, dtype=np.uint32).tolist()), state.normal))


def _packed(words: Sequence[int]) -> bytes:
    return np.asarray(words, dtype=np.uint32).tobytes()


def _memory_at(address: int) -> Any:
    """The memory of a Mersenne Twister: reading `raw` copies it out, setting `raw` copies into it."""
    return (ctypes.c_char * _RAW).from_address(address)


def _find_python() -> Any:
    """Where CPython keeps the state of `random`'s generator; None if it does not look as expected."""
    if sys.implementation.name != "cpython":
        return None
    memory = _memory_at(id(_python) + object.__basicsize__)
    words = _python.getstate()[1]
    return memory if memory.raw == _packed([words[-1], *words[:-1]]) else None


_python: Any = random._inst
_python_memory = _find_python()


class _NumpyMemory:
    """Where NumPy's global generator keeps its state; None if it does not look as expected."""

    generator: Any = None
    memory: Any = None


def _numpy_memory() -> Any:
    generator = _numpy_random.get_bit_generator()
    if generator is not _NumpyMemory.generator:
        _NumpyMemory.generator, _NumpyMemory.memory = generator, _checked_memory(generator)
    return _NumpyMemory.memory


def _checked_memory(generator: Any) -> Any:
    state: Any = np.random.get_state()
    if state[0] != "MT19937":
        return None
    memory = _memory_at(int(generator.ctypes.state_address))
    expected = np.asarray(state[1], dtype=np.uint32).tobytes() + int(state[2]).to_bytes(4, "little")
    return memory if memory.raw == expected else None

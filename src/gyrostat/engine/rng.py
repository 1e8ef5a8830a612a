"""The random streams of torch, NumPy and Python, and how they are exchanged in microseconds.

A virtual worker owns one `RngState`. Switching it in and out happens twice per micro-batch, so the costs matter: torch
1 µs, Python 12 µs, NumPy 80 µs by its public calls. NumPy's Mersenne Twister is therefore copied as raw memory
(`ctypes.state_address` is public; the layout is checked once against the public state), except when a cached normal
variate is involved, which lives elsewhere: then the public calls are used.
"""

from __future__ import annotations

import ctypes
import random
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
class NumpyState:
    """NumPy's global generator: key and position as raw bytes, and the cached normal variate if there is one."""

    raw: bytes
    normal: float | None = None


@dataclass(frozen=True)
class RngState:
    """All streams of one virtual worker, or the shared ones."""

    torch: Tensor
    numpy: NumpyState
    python: tuple[Any, ...]
    cuda: Tensor | None = None

    def to_tree(self) -> dict[str, Any]:
        return {
            "torch": self.torch,
            "numpy": {"raw": self.numpy.raw, "normal": self.numpy.normal},
            "python": self.python,
            "cuda": self.cuda,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RngState:
        return cls(
            torch=tree["torch"],
            numpy=NumpyState(tree["numpy"]["raw"], tree["numpy"]["normal"]),
            python=tree["python"],
            cuda=tree["cuda"],
        )


def seed_all(seed: int) -> None:
    """Seed all streams in force, as a DDP script would."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Streams:
    """The process's streams in force. Remembers what it installed, to save only what changed."""

    def __init__(self) -> None:
        self._installed = self.save()

    def save(self, *, known: RngState | None = None) -> RngState:
        """The streams as they are now. Parts that did not change since `known` was installed are shared with it."""
        return RngState(
            torch=torch.default_generator.get_state(),
            numpy=_numpy_state(known.numpy if known else None),
            python=random.getstate(),
            cuda=torch.cuda.get_rng_state() if _cuda.is_initialized() else None,
        )

    def exchange(self, incoming: RngState) -> RngState:
        """Put `incoming` in force; returns what was."""
        outgoing = self.save(known=self._installed)
        torch.default_generator.set_state(incoming.torch)
        if incoming.numpy != outgoing.numpy:
            _install_numpy(incoming.numpy, over=outgoing.numpy)
        random.setstate(incoming.python)
        if incoming.cuda is not None:
            torch.cuda.set_rng_state(incoming.cuda)
        self._installed = incoming
        return outgoing


def _numpy_state(known: NumpyState | None) -> NumpyState:
    address = _numpy_address()
    if address is not None and known is not None and known.normal is None:
        # No cached normal then, and not one word drawn since: there is none now.
        raw = ctypes.string_at(address, _RAW)
        if raw == known.raw:
            return known
    _, key, position, has_normal, normal = np.random.get_state()
    raw = np.asarray(key, dtype=np.uint32).tobytes() + int(position).to_bytes(4, "little")
    return NumpyState(raw, float(normal) if has_normal else None)


def _install_numpy(state: NumpyState, *, over: NumpyState) -> None:
    address = _numpy_address()
    if address is not None and state.normal is None and over.normal is None:
        ctypes.memmove(address, state.raw, _RAW)
        return
    key = np.frombuffer(state.raw, dtype=np.uint32, count=_WORDS)
    position = int.from_bytes(state.raw[_WORDS * 4 :], "little")
    np.random.set_state(("MT19937", key, position, int(state.normal is not None), state.normal or 0.0))


class _NumpyMemory:
    """Where NumPy's global generator keeps its state, if it looks as expected."""

    generator: Any = None
    address: int | None = None


def _numpy_address() -> int | None:
    generator = _numpy_random.get_bit_generator()
    if generator is not _NumpyMemory.generator:
        _NumpyMemory.generator, _NumpyMemory.address = generator, _checked_address(generator)
    return _NumpyMemory.address


def _checked_address(generator: Any) -> int | None:
    state: Any = np.random.get_state()
    if state[0] != "MT19937":
        return None
    address = int(generator.ctypes.state_address)
    expected = np.asarray(state[1], dtype=np.uint32).tobytes() + int(state[2]).to_bytes(4, "little")
    return address if ctypes.string_at(address, _RAW) == expected else None

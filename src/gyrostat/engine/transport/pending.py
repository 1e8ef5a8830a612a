"""A transfer under way, and how a thread waits for it without outliving its generation.

gloo reports the death of a worker only to some of the others, and never that a worker has gone silent. So a thread that waits
checks every 20 ms whether the generation has been superseded (`GenerationFloor`); if so it raises `PeerLost`, as it does for
gloo's own errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from gyrostat.core.errors import PeerLost

_TIMED_OUT = "Operation timed out!"
_POLL = timedelta(milliseconds=20)

WaitFor = Callable[[list[Any]], None]
"""Waits until all of these works are complete."""


class GenerationFloor:
    """The oldest valid generation. The control thread raises it when a worker is lost; threads that wait read it."""

    def __init__(self) -> None:
        self.generation = 0


class Pending:
    """A transfer under way. It keeps its tensor alive."""

    def __init__(
        self, works: list[Any], tensor: torch.Tensor, wait_for: WaitFor, error: PeerLost | None = None
    ) -> None:
        self.works, self.tensor, self._wait_for, self._error = works, tensor, wait_for, error

    def wait(self) -> torch.Tensor:
        """The tensor, when the transfer is complete. For NCCL the current stream waits, and the host does not."""
        if self._error is not None:
            raise self._error
        self._wait_for(self.works)
        self.works = []
        return self.tensor


def wait_while_valid(works: list[Any], check_valid: Callable[[], None], timeout: timedelta) -> None:
    """Wait for gloo's works; raise what `check_valid` raises, or `PeerLost` after `timeout` for one of them."""
    for work in works:
        deadline: float | None = None
        while True:
            try:
                work.wait(_POLL)
                break
            except RuntimeError as error:
                if _TIMED_OUT not in str(error):
                    raise as_peer_lost(error) from error
                check_valid()
                deadline = deadline or time.monotonic() + timeout.total_seconds()
                if time.monotonic() > deadline:
                    raise as_peer_lost(error) from error


def wait_without_checks(works: list[Any]) -> None:
    """Wait until the end, or gloo's own timeout. For NCCL the current stream waits."""
    with losing_peers():
        for work in works:
            work.wait()


def call_all(works: list[Any]) -> None:
    """Wait for works of the shared-memory transport, which are functions."""
    for work in works:
        work()


@contextmanager
def losing_peers() -> Iterator[None]:
    """Raise `PeerLost` for gloo's RuntimeErrors: a peer went away, or was silent for too long."""
    try:
        yield
    except RuntimeError as error:
        raise as_peer_lost(error) from error


def as_peer_lost(error: RuntimeError) -> PeerLost:
    return PeerLost(f"lost another worker in the middle of a collective: {error}")

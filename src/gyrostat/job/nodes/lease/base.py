"""The interface of a lease store.

A job has one lease. The agent that acquires it gets a token larger than any before, and holds the lease until it expires,
unless it renews it. The store also has values, written with `put` under a token: the store refuses a token that is not in
force, so a deposed leader that did not notice it (stopped, disconnected, paused with its machine) cannot write any more.

Time is `clock`, seconds since the machine booted: the same for all processes of a machine, never set, and running while the
machine sleeps. Times of two machines are never compared.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gyrostat.core.errors import Deposed, Misuse, ValueTooLarge

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_LONGEST_KEY = 200
LARGEST_VALUE = 1 << 20
"""Bytes. etcd refuses requests of more than 1.5 MiB."""


def clock() -> float:
    """Seconds since boot, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True)
class Lease:
    """The leader, and the token with which it writes."""

    holder: str
    token: int
    """Larger than that of every lease before."""
    expires: float | None = None
    """Known to its holder: before this time on its `clock` no other agent can hold the lease."""


@dataclass(frozen=True)
class LeaseView:
    """The holder of the lease, or none, at one point in the store's history."""

    lease: Lease | None
    as_of: int
    """Views and tokens of one store are comparable: the larger number is later. A vacancy is later than the lease with the same
    number."""

    @property
    def order(self) -> tuple[int, bool]:
        return (self.as_of, self.lease is None)


class LeaseWatch(Protocol):
    def close(self) -> None:
        """After this returns, the callback is not called any more."""


class LeaseStore(Protocol):
    """Thread-safe. Every request raises `StoreUnreachable` if the store does not answer; the store may have carried it out
    nevertheless."""

    def acquire(self, holder: str, ttl: float) -> Lease | LeaseView:
        """Acquire the lease for at least `ttl` seconds; a `LeaseView` if another agent holds it."""

    def renew(self, lease: Lease) -> Lease:
        """The same lease with a later expiry; `Deposed` if it is not in force any more."""

    def release(self, lease: Lease) -> None:
        """Let other agents acquire it at once. No effect if the lease is not in force any more."""

    def current(self) -> LeaseView:
        """The current holder."""

    def watch(self, on_view: Callable[[LeaseView], None]) -> LeaseWatch:
        """Call `on_view` in a thread of the watch with the current view, and whenever it changes. The watch reconnects; of
        changes meanwhile only the newest is reported."""

    def put(self, key: str, value: bytes, token: int) -> None:
        """Write durably if the lease with this token is in force; otherwise write nothing and raise `Deposed`. Raises
        `ValueTooLarge` for more than `LARGEST_VALUE` bytes."""

    def get(self, key: str) -> bytes | None:
        """The newest value of this key. Needs no lease."""

    def close(self) -> None:
        """Close connections. Does not release leases."""


def check_key(key: str) -> str:
    """Returns the key if every store accepts it; raises otherwise."""
    if len(key) > _LONGEST_KEY or not _KEY.fullmatch(key):
        raise Misuse(
            f"a key in a lease store is words of letters, digits, '.', '_' and '-', joined by '/', at most {_LONGEST_KEY} "
            f"characters in all; got {key!r}"
        )
    return key


def check_value(key: str, value: bytes) -> bytes:
    """Returns the value if every store accepts it; raises otherwise."""
    if len(value) > LARGEST_VALUE:
        raise ValueTooLarge(f"{key!r} has {len(value)} bytes; a lease store keeps at most {LARGEST_VALUE}")
    return value


def deposed(token: int, now: Lease | None) -> Deposed:
    leader = "there is no leader" if now is None else f"{now.holder} leads now, with token {now.token}"
    return Deposed(
        f"the lease with token {token} is not in force ({leader}); nothing was written, and this agent must stop leading"
    )

"""What a lease store promises.

One lease per job. Whoever acquires it gets a token larger than any before, and holds it until it expires, unless it is
renewed. Beside the lease lie values, written with `put` under a token: the store itself refuses a token that is not in
force, so a leader that was deposed without noticing (stopped, cut off, paused with its machine) cannot write any more.

Time is `clock`, seconds since the machine booted: the same for all processes of a machine, never set, and running on
while the machine sleeps. Times of two machines are never compared.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gyrostat.core.errors import Deposed, Misuse

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_LONGEST_KEY = 200


def clock() -> float:
    """Seconds since boot, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True)
class Lease:
    """Who leads, and the number under which it writes."""

    holder: str
    token: int
    """Larger than that of every lease before."""
    expires: float | None = None
    """Known to its holder: before this instant on its `clock` nobody else can hold the lease."""


@dataclass(frozen=True)
class LeaseView:
    """Who held the lease, if anybody, at one instant of the store's history."""

    lease: Lease | None
    as_of: int
    """Views and tokens of one store compare: what has the larger number is later. A vacancy is later than the lease whose
    number it bears."""

    @property
    def order(self) -> tuple[int, bool]:
        return (self.as_of, self.lease is None)


class LeaseWatch(Protocol):
    def close(self) -> None:
        """No more views are reported once this has returned."""


class LeaseStore(Protocol):
    """All of this may be called from any thread. Whatever touches the store raises `StoreUnreachable` when it does not answer;
    it may have done what was asked nevertheless."""

    def acquire(self, holder: str, ttl: float) -> Lease | LeaseView:
        """Our lease, for `ttl` seconds or as many more as the store needs; or, if somebody holds it, who."""

    def renew(self, lease: Lease) -> Lease:
        """The same lease, expiring later; `Deposed` if it is not in force any more."""

    def release(self, lease: Lease) -> None:
        """Let others have it at once. A lease that is not in force any more is left alone."""

    def current(self) -> LeaseView:
        """Who holds the lease now."""

    def watch(self, saw: Callable[[LeaseView], None]) -> LeaseWatch:
        """Call `saw`, from a thread of the watch, with who holds the lease, now and whenever that changes. Lost connections
        are made again; changes meanwhile are not told one by one, but the newest is."""

    def put(self, key: str, value: bytes, token: int) -> None:
        """Write durably if the lease with this token is in force, else write nothing and raise `Deposed`."""

    def get(self, key: str) -> bytes | None:
        """What was last written under this key; the newest, whoever asks."""

    def close(self) -> None:
        """Give up connections. Leases are not released by this."""


def check_key(key: str) -> str:
    """The key itself, if every store can hold it."""
    if len(key) > _LONGEST_KEY or not _KEY.fullmatch(key):
        raise Misuse(
            f"a key in a lease store is words of letters, digits, '.', '_' and '-', joined by '/', at most {_LONGEST_KEY} "
            f"characters in all; got {key!r}"
        )
    return key


def deposed(token: int, now: Lease | None) -> Deposed:
    leader = "nobody leads" if now is None else f"{now.holder} leads now, with token {now.token}"
    return Deposed(f"the lease with token {token} is over ({leader}); nothing was written. Stop leading")

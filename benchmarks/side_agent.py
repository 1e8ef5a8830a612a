"""One agent of `leader_failover.py`, in a process of its own: a campaign that says what happens to it, and when.

Lines on standard output: "lead", "follow HOLDER" or "vacant", each with the machine's monotonic clock in nanoseconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from gyrostat.job.nodes.lease import Campaign, LeaseStore, LeaseView, Timing, open_store
from gyrostat.job.nodes.lease.base import LeaseWatch


def say(what: str) -> None:
    os.write(1, f"{what} {time.monotonic_ns()}\n".encode())


class Watched:
    """A store that also says when its watch sees that nobody leads."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def watch(self, saw: Callable[[LeaseView], None]) -> LeaseWatch:
        def say_and_pass_on(view: LeaseView) -> None:
            if view.lease is None:
                say("vacant")
            saw(view)

        return self._store.watch(say_and_pass_on)


def main(address: str, name: str, ttl: str, agents: str) -> None:
    with Campaign(
        Watched(open_store(address)),  # type: ignore[arg-type]
        name,
        on_lead=lambda token: say("lead"),
        on_follow=lambda holder: say(f"follow {holder}"),
        on_lost=lambda why: say("lost"),
        timing=Timing(ttl=float(ttl), agents=int(agents)),
    ):
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

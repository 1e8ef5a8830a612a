"""A daemon that is killed at a chosen instant: `python -m tests.local.crashing DIRECTORY POINT submit|finish NAME`.

It submits a job, or lets one finish, and is killed by itself, with SIGKILL, when it reaches
the point: before or after a function, when its arguments fit. `POINTS` are the steps of a submission, a resize and an end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyrostat.cluster.registry import Registry
from gyrostat.local import attempts
from gyrostat.local.driver import Driver
from gyrostat.local.host_pool import HostPool
from gyrostat.local.store import Store
from tests.local.clusters import TIMEOUT_S, at_step, running, spec

STEPS = 300
PAUSE_S = 0.05


@dataclass(frozen=True)
class Point:
    """When to die: `before` or after this function is called, if the arguments fit."""

    owner: Any
    function: str
    before: bool
    fits: Callable[..., bool] = lambda *args, **fields: True


def _event(kind: str) -> Callable[..., bool]:
    return lambda *args, **fields: kind in args


def _first(*args: Any, **fields: Any) -> bool:
    """It is a submission that is written."""
    events = args[2] if len(args) > 2 else ()
    return any(event.kind == "submitted" for event in events)


POINTS = {
    "submission, before it is written": Point(Store, "put", True, _first),
    "submission, written": Point(Store, "put", False, _first),
    "start, before it is written": Point(Registry, "move", True, _event("started")),
    "start, written": Point(Registry, "move", False, _event("started")),
    "start, before the order": Point(attempts, "write_order", True),
    "start, ordered": Point(attempts, "write_order", False),
    "start, given to a host": Point(HostPool, "send", False),
    "start, trains": Point(Registry, "move", False, _event("running")),
    "resize, before it is written": Point(Registry, "move", True, _event("resized")),
    "resize, written": Point(Registry, "move", False, _event("resized")),
    "resize, asked": Point(Driver, "_occupy", False),
    "resize, answered": Point(Driver, "_handle_move", True),
    "end, before it is reported": Point(Driver, "_report_end", True),
    "end, before it is written": Point(Registry, "move", True, _event("finished")),
    "end, written": Point(Registry, "move", False, _event("finished")),
}


def main() -> None:
    directory, point, deed, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    at_once = point.startswith(
        ("submission", "start")
    )  # others come with the deed: what is left to do is done before
    if at_once:
        _arm(POINTS[point])
    with running(directory, spare=0) as daemon:
        known = [job.name for job in daemon.service.jobs(None)]
        if known and deed == "submit":
            at_step(daemon, "a", 1)
        if not at_once:
            _arm(POINTS[point])
        if deed == "finish":
            (directory / f"hurry-{name}").touch()
        elif name not in known:
            workers = 4 if name == "a" else 1
            job = spec(directory, STEPS, PAUSE_S, name=name, virtual_workers=workers, checkpoint_every=10)
            daemon.service.submit(job, "me")
            with (directory / "accepted").open("a") as file:
                print(name, file=file)
        daemon.wait(TIMEOUT_S)
    raise AssertionError("it lives")


def _arm(point: Point) -> None:
    do = getattr(point.owner, point.function)

    def deadly(*args: Any, **fields: Any) -> Any:
        if not point.fits(*args, **fields):
            return do(*args, **fields)
        if point.before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = do(*args, **fields)
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(point.owner, point.function, deadly)


if __name__ == "__main__":
    main()

"""`gyrostat down`: end the cluster of this machine; its jobs checkpoint first."""

from __future__ import annotations

import fcntl
import signal
import time
from typing import Annotated

import typer

from gyrostat.cli.up import LEAVE_JOBS, State, home_of
from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.local.home import Home
from gyrostat.local.host_files import ProcessIdentity

_HELP = "\n\n".join(
    [
        "End the cluster on this machine.",
        "Its jobs checkpoint at their next boundary and wait; `gyrostat up` lets them go on, with the same bits. With "
        "--leave-jobs they train on meanwhile, and the next `up` takes them back.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("down", help=_HELP, short_help="End the cluster on this machine.")(down)


def down(
    state: State = None,
    leave_jobs: Annotated[bool, typer.Option("--leave-jobs", help="They train on.")] = False,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long to wait for it to be gone.")
    ] = 600.0,
) -> None:
    home = home_of(state)
    daemon = _daemon_of(home)
    if daemon is None:
        raise UsageError(f"no cluster is running in {home.path}; if it is elsewhere: --state DIR")
    if not daemon.end(LEAVE_JOBS if leave_jobs else signal.SIGTERM, patience):
        raise GyrostatError(
            f"the cluster (process {daemon.pid}) has been asked to end, and is still waiting for its jobs after {patience:g} s"
        )
    print(f"gyrostat: the cluster in {home.path} has ended")


def _daemon_of(home: Home) -> ProcessIdentity | None:
    """The process that has locked the state directory."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        try:
            with home.lock.open("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return None
                except BlockingIOError:
                    text = file.read().strip()
        except FileNotFoundError:
            return None
        if text.isdigit() and (process := ProcessIdentity.of(int(text))) is not None:
            return process
        time.sleep(0.01)  # it is being started, and has yet to say who it is
    return None

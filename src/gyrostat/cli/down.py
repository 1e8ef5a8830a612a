"""`gyrostat down`: stop the cluster on this machine; its jobs checkpoint first."""

from __future__ import annotations

import fcntl
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli.renamed import accepting
from gyrostat.cli.up import LEAVE_JOBS, State, home_of
from gyrostat.core.errors import GyrostatError, UsageError

if TYPE_CHECKING:
    from gyrostat.local.home import Home
    from gyrostat.local.host_files import ProcessIdentity

_HELP = "\n\n".join(
    [
        "Stop the cluster on this machine.",
        "Its jobs checkpoint at their next step boundary and end; one that reaches none within `up --preemption-grace` is "
        "killed, and keeps its newest checkpoint. The next `gyrostat up` resumes them, with the same bits. "
        "With --leave-jobs they continue to train, and the next `up` adopts them.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("down", help=_HELP, cls=accepting({"--patience": "--timeout"}))(down)


def down(
    state: State = None,
    leave_jobs: Annotated[bool, typer.Option("--leave-jobs", help="Jobs continue to train.")] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="Maximum time to wait for the end of the cluster."),
    ] = 600.0,
) -> None:
    home = home_of(state)
    daemon = _daemon_of(home)
    if daemon is None:
        raise UsageError(f"no cluster is running in {home.path}; for another state directory: --state DIR")
    if not daemon.end(LEAVE_JOBS if leave_jobs else signal.SIGTERM, timeout):
        raise GyrostatError(
            f"the cluster (process {daemon.pid}) was asked to stop and still waits for its jobs after {timeout:g} s"
        )
    print(f"gyrostat: the cluster in {home.path} has ended")


def _daemon_of(home: Home) -> ProcessIdentity | None:
    """The process that has locked the state directory."""
    from gyrostat.local.host_files import ProcessIdentity

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
        time.sleep(0.01)  # it is starting and has not written its process id yet
    return None

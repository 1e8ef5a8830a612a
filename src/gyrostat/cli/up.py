"""`gyrostat up`: a cluster on this machine, in the foreground with a live view, or in the background."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli import environment, log_options
from gyrostat.cluster.eviction import GRACE_S
from gyrostat.core import logs
from gyrostat.core.errors import UsageError

if TYPE_CHECKING:
    from gyrostat.cluster.layout import ClusterLayout
    from gyrostat.local.daemon import Daemon
    from gyrostat.local.home import Home

LEAVE_JOBS = signal.SIGUSR2
_HELP = "\n\n".join(
    [
        "Start a cluster on this machine. It manages the devices and runs submitted jobs.",
        "[bold]Examples[/bold]",
        "  gyrostat up                                  (the GPUs of the machine, or one slot per CPU)",
        "  gyrostat up --devices cpu:4 --policy wfs     (four slots with weighted fair sharing)",
        "  gyrostat up --devices fast:2@400,slow:2@100  (emulated devices with this many samples/s)",
        "  gyrostat up --cluster cells.yaml --detach    (cells and tenants, see docs/reference/cells.md)",
        "Then, in another terminal: gyrostat submit --virtual-workers 4 train.py; gyrostat top.",
        "Jobs survive this process: if it is killed, they continue to train, and the next `gyrostat up` with the same state "
        "directory adopts them. On Ctrl-C or `gyrostat down` they checkpoint first; the next `up` resumes them.",
    ]
)
_READY_S = 60.0
_OPEN_FILES = 65536


def register(app: typer.Typer) -> None:
    app.command("up", help=_HELP)(up)


State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        show_default="$GYROSTAT_STATE_DIR or ~/.local/state/gyrostat",
        help="State directory of the cluster.",
    ),
]


def home_of(state: Path | None) -> Home:
    from gyrostat.local.home import Home, default_home

    return default_home() if state is None else Home(state.absolute())


def up(
    devices: Annotated[
        str | None,
        typer.Option(metavar="TYPE:COUNT[@PACE],…", show_default="detected", help="Devices of the cluster."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Cell file with machines, cells and tenants (docs/reference/cells.md)."
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME[:SETTING=VALUE,…]", help="Scheduling policy (docs/reference/policies.md)."
        ),
    ] = "wfs",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the API; port 0: any free port.")
    ] = "127.0.0.1:7460",
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Token file; without it, the API is on loopback only and open to all local users.",
        ),
    ] = None,
    workdir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Directory below which jobs may run. May be repeated.",
            show_default="anywhere",
        ),
    ] = None,
    modules: Annotated[
        bool, typer.Option("--modules", help="With --workdir: jobs may be modules, which may be anywhere.")
    ] = False,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable, or a pattern such as 'WANDB_*', that jobs inherit. May be repeated.",
            show_default="what training needs, see docs/howto/cluster.md",
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(metavar="HOURS", min=0.0, help="Hours for which ended jobs are kept.")
    ] = 168.0,
    spare: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Idle host processes for a fast start of jobs; 10 MB each."),
    ] = 1,
    preemption_grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="Seconds in which a job leaves devices at a boundary if it is preempted, paused or stopped by `down`; then "
            "its workers there are killed.",
        ),
    ] = GRACE_S,
    state: State = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background.")] = False,
    verbose: log_options.Verbose = 0,
    log_format: log_options.Format = None,
) -> None:
    if devices is not None and cluster is not None:
        raise UsageError("--devices and --cluster both define the devices; give one of them")
    if math.isnan(preemption_grace):
        raise UsageError("--preemption-grace is a number of seconds, such as 30; got nan")
    home = home_of(state)
    if detach:
        _detach(home)
        return
    from gyrostat.cli.up_display import watch
    from gyrostat.cluster.api.server import ApiServer
    from gyrostat.local.daemon import Daemon
    from gyrostat.local.layout import found_layout, layout_of_file, layout_of_slots

    logs.configure(verbose, log_format)
    layout = found_layout() if cluster is None else layout_of_file(cluster)
    if devices is not None:
        layout = layout_of_slots(devices)
    _allow_open_files()
    roots = tuple(path.absolute() for path in workdir or ())
    daemon = Daemon(
        home,
        layout,
        policy,
        keep=keep * 3600.0,
        spare=spare,
        workdirs=roots,
        modules=modules,
        grace=preemption_grace,
        pass_env=pass_env or (),
    )
    with contextlib.ExitStack() as stack:
        server = ApiServer(daemon.service, listen, tokens)
        stack.callback(server.stop)  # last: a client that requested the end waits until the API is closed
        stack.enter_context(daemon)
        stack.enter_context(_ended_by_signals(daemon))
        server.start()
        home.announce(server.url)
        stack.callback(home.withdraw)
        print(
            f"gyrostat: a cluster of {_devices(layout)} at {server.url}, policy {policy}; state in {home.path}",
            flush=True,
        )
        watch(daemon)
        print("gyrostat: ending", flush=True)


def _allow_open_files() -> None:
    """Raise the limit of open files: every connection and every running job needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _devices(layout: ClusterLayout) -> str:
    return ", ".join(f"{number} {type_}" for type_, number in layout.fleet.totals.items())


@contextlib.contextmanager
def _ended_by_signals(daemon: Daemon) -> Iterator[None]:
    """SIGINT and SIGTERM: jobs checkpoint first. SIGUSR2: they continue to train."""

    def end(number: int, frame: FrameType | None) -> None:
        daemon.service.shutdown(checkpoint=number != LEAVE_JOBS)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, LEAVE_JOBS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _detach(home: Home) -> None:
    """Start the same command in the background; returns when its API responds."""
    home.make()
    command = [sys.executable, "-P", "-c", "from gyrostat.cli.main import main; main()"]
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    with home.log.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment.without_secrets(),
            start_new_session=True,
        )
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        endpoint = home.endpoint()
        if endpoint is not None and endpoint.pid == process.pid:
            print(
                f"gyrostat: a cluster in the background (process {process.pid}) at {endpoint.url}; log: {home.log}"
            )
            return
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    lines = home.log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
    why = lines[-1].removeprefix("gyrostat: error: ") if lines else f"see {home.log}"
    raise UsageError(f"the cluster did not start: {why}")

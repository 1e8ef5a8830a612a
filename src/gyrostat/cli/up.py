"""`gyrostat up`: a cluster on this machine, in front with a live view, or in the background."""

from __future__ import annotations

import contextlib
import logging
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

from gyrostat.cli.up_display import watch
from gyrostat.core.errors import UsageError
from gyrostat.local.home import Home, default_home

if TYPE_CHECKING:
    from gyrostat.cluster.layout import ClusterLayout
    from gyrostat.local.daemon import Daemon

LEAVE_JOBS = signal.SIGUSR2
_HELP = "\n\n".join(
    [
        "Start a cluster on this machine: it owns the devices, and runs the jobs that are submitted to it.",
        "[bold]Examples[/bold]",
        "  gyrostat up                                  (what is there: GPUs, or one slot per CPU)",
        "  gyrostat up --devices cpu:4 --policy wfs     (four slots, shared fairly; jobs grow and shrink)",
        "  gyrostat up --devices fast:2@400,slow:2@100  (paced slots: so many samples per second; they wait, not compute)",
        "  gyrostat up --cluster cells.yaml --detach    (cells and tenants: docs/cells.md; in the background)",
        "Then, in another terminal: gyrostat submit --virtual-workers 4 train.py; gyrostat top.",
        "Jobs outlive this process: if it is killed, they train on, and the next `gyrostat up` in the same state directory "
        "finds them again. Ctrl-C or `gyrostat down` has them checkpoint first; they go on with the next `up`.",
    ]
)
_READY_S = 60.0
_OPEN_FILES = 65536


def register(app: typer.Typer) -> None:
    app.command("up", help=_HELP, short_help="Start a cluster on this machine.")(up)


State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        show_default="$GYROSTAT_STATE_DIR or ~/.local/state/gyrostat",
        help="Where the cluster keeps its state.",
    ),
]


def home_of(state: Path | None) -> Home:
    return default_home() if state is None else Home(state.absolute())


def up(
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE:COUNT[@PACE],…", show_default="what is found", help="The slots that it has."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A cell file: machines, cells, tenants (docs/cells.md)."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME[:SETTING=VALUE,…]", help="How jobs share; see `gyrostat simulate --help`."
        ),
    ] = "wfs",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where its API answers; port 0: any free one.")
    ] = "127.0.0.1:7460",
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Who may ask; without it, only loopback, and everybody there."),
    ] = None,
    workdir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Jobs run below these only; give it several times.", show_default="anywhere"
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(metavar="HOURS", min=0.0, help="How long jobs that have ended are kept.")
    ] = 168.0,
    spare: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Processes kept ready, so that jobs start at once; 10 MB each."
        ),
    ] = 1,
    state: State = None,
    detach: Annotated[bool, typer.Option("--detach", help="In the background.")] = False,
) -> None:
    if devices is not None and cluster is not None:
        raise UsageError("--devices and --cluster both say what there is; give one of them")
    home = home_of(state)
    if detach:
        _detach(home)
        return
    from gyrostat.cluster.api.server import ApiServer
    from gyrostat.local.daemon import Daemon
    from gyrostat.local.layout import found_layout, layout_of_file, layout_of_slots

    layout = found_layout() if cluster is None else layout_of_file(cluster)
    if devices is not None:
        layout = layout_of_slots(devices)
    _allow_open_files()
    roots = tuple(path.absolute() for path in workdir or ())
    daemon = Daemon(home, layout, policy, keep=keep * 3600.0, spare=spare, workdirs=roots)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    with contextlib.ExitStack() as stack:
        server = ApiServer(daemon.service, listen, tokens)
        stack.callback(server.stop)  # last: who asked for the end waits for the API to be gone
        stack.enter_context(daemon)
        stack.enter_context(_ended_by_signals(daemon))
        server.start()
        home.announce(server.url)
        stack.callback(home.withdraw)
        print(
            f"gyrostat: a cluster of {_told(layout)} at {server.url}, policy {policy}; state in {home.path}",
            flush=True,
        )
        watch(daemon)
        print("gyrostat: ending", flush=True)


def _allow_open_files() -> None:
    """As many as the system lets us: every connection and every job that runs needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _told(layout: ClusterLayout) -> str:
    return ", ".join(f"{number} {type_}" for type_, number in layout.fleet.totals.items())


@contextlib.contextmanager
def _ended_by_signals(daemon: Daemon) -> Iterator[None]:
    """SIGINT and SIGTERM: jobs checkpoint first. SIGUSR2: they train on."""

    def end(number: int, frame: FrameType | None) -> None:
        daemon.service.shutdown(checkpoint=number != LEAVE_JOBS)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, LEAVE_JOBS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _detach(home: Home) -> None:
    """The same command in the background; returns when its API answers."""
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
    said = home.log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
    raise UsageError(f"the cluster did not start: {said[-1] if said else f'see {home.log}'}")

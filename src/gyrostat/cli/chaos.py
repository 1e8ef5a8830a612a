"""`gyrostat chaos`: injects random faults into a job, and compares its result with that of an undisturbed run."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli import log_options
from gyrostat.cli import run_options as given
from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.core import logs
from gyrostat.core.errors import UsageError
from gyrostat.core.files import check_writable, make_directory
from gyrostat.core.roles import ServerRecovery, ServerRole
from gyrostat.job.chaos.plan import StoreKind

_GYROSTAT = (sys.executable, "-P", "-c", "from gyrostat.cli.main import main; main()")
_HELP = "\n\n".join(
    [
        "Inject random faults into a job, and compare its result with that of an undisturbed run.",
        "  gyrostat chaos -n 8 -w 4 --minutes 5 --seed 1 train.py --epochs 2",
        "  gyrostat chaos -n 8 -w 4 --nodes 3 --store etcd --minutes 5 train.py --epochs 2",
        "  gyrostat chaos -n 8 -w 4 --cluster --minutes 5 train.py --epochs 2",
        "  gyrostat chaos --servers 2 -w 3 --minutes 5 recommender.py --epochs 2",
        "The job runs once undisturbed, then repeatedly while its processes are killed and stopped and the job is resized: "
        "from its start on, with and without checkpoints, under one leader, several agents or a cluster. Choose arguments "
        "with which one run takes at least ten seconds.",
        "The runs are equal if each ends with the digest of the undisturbed run, every step has the same loss and samples, and "
        "exit codes say so. Of a job with parameter servers, every batch must be counted once; digests are compared if two "
        "undisturbed runs of different sizes give the same one. Exit code: 0 if they are equal, otherwise 1: wrong results, "
        "hangs, untrue exit codes. A seed fixes "
        "the faults and their times; the processes they hit depend on the state of the job. Round R of seed S is round 0 of "
        "seed S + R.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command(
        "chaos",
        help=_HELP,
        context_settings={"allow_interspersed_args": False},
    )(chaos)


def chaos(
    script: Script,
    args: Args = None,
    module: Module = False,
    virtual_workers: given.VirtualWorkers = None,
    workers: given.Workers = None,
    minutes: Annotated[float, typer.Option(metavar="M", help="Inject faults for M minutes.")] = 1.0,
    faults: Annotated[
        int | None, typer.Option(metavar="K", show_default=False, help="Maximum number of faults.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the faults and their times.")] = 0,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Mean time between two faults.")] = 2.0,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            show_default="2, or 1 without grpcio",
            help="Number of agents, one of which leads. With 1, no agent is killed.",
        ),
    ] = None,
    store: Annotated[
        StoreKind,
        typer.Option(help="Where agents keep their lease: a file, or an etcd that is killed, too."),
    ] = StoreKind.FILE,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Submit the job to a cluster of its own, twice; P is its number of devices."
        ),
    ] = False,
    servers: given.Servers = 0,
    server_recovery: given.ServerRecovery = ServerRecovery.EXACT,
    checkpoint_every: given.CheckpointEvery = 20,
    paced: given.Paced = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", show_default=False, help="Write the result as JSON."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default=False, help="Keep records, logs and checkpoints of all rounds in DIR."
        ),
    ] = None,
    verbose: log_options.Verbose = 0,
    log_format: log_options.Format = None,
) -> None:
    from gyrostat.cli.chaos_display import Printer, print_verdict
    from gyrostat.job.chaos.run_target import RunTarget, check_etcd
    from gyrostat.job.chaos.runner import ChaosRequest, MakeTarget, run_chaos
    from gyrostat.job.control.report import write_json
    from gyrostat.job.processes.protocol import Program
    from gyrostat.local.chaos_target import ClusterTarget, check_pace

    logs.configure(verbose, log_format)
    if json is not None:
        check_writable(json, "--json")
    if keep is not None:
        make_directory(keep, "--keep")
        if any(keep.iterdir()):
            raise UsageError(f"--keep {keep}: the directory is not empty; give a new one")
    if cluster and (nodes is not None or store is not StoreKind.FILE):
        raise UsageError(
            "--cluster runs the job in a cluster, --nodes and --store run it under agents; give one of them"
        )
    if servers:
        _check_servers(servers, server_recovery, nodes=nodes, cluster=cluster, paced=paced)
    elif server_recovery is not ServerRecovery.EXACT:
        raise UsageError("--server-recovery is for a job with parameter servers: --servers S")
    agents = 0 if servers else _agents(nodes)
    make_target: MakeTarget
    if cluster:
        check_pace(paced)
        make_target = partial(ClusterTarget, (*_GYROSTAT, "up"))
    else:
        if store is StoreKind.ETCD:
            check_etcd()
        make_target = partial(RunTarget, (*_GYROSTAT, "run"), agents=agents, store=store)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leaves no process behind
    directory = (keep or Path(tempfile.mkdtemp(prefix="gyrostat-chaos-"))).absolute()
    request = ChaosRequest(
        program=Program(name=script, module=module, args=tuple(args or ())),
        virtual_workers=virtual_workers or (1 if servers else workers or 2),
        workers=workers or 2,
        directory=directory,
        seed=seed,
        seconds=60 * minutes,
        faults=faults,
        every=every,
        paced=paced,
        checkpoint_every=checkpoint_every,
        servers=servers,
        server_recovery=server_recovery,
        keep=keep is not None,
    )
    try:
        verdict = run_chaos(request, partial(RunTarget, (*_GYROSTAT, "run")), make_target, Printer())
    except UsageError:
        if keep is None:
            shutil.rmtree(directory)
        raise
    print_verdict(verdict)
    if json is not None:
        write_json(json, verdict.as_json())
    if not verdict.ok:
        logs.note(f"records and logs of the round that failed are in {directory}")
        raise typer.Exit(1)
    if keep is None:
        shutil.rmtree(directory)


def _check_servers(
    servers: int, recovery: ServerRecovery, *, nodes: int | None, cluster: bool, paced: str | None
) -> None:
    ServerRole(count=servers, recovery=recovery)  # checks itself
    for name, is_given in (
        ("--nodes", nodes not in (None, 1)),
        ("--cluster", cluster),
        ("--paced", bool(paced)),
    ):
        if is_given:
            raise UsageError(
                f"{name} does not go together with --servers: its job runs under one `gyrostat run`"
            )


def _agents(nodes: int | None) -> int:
    """0: the process that starts the job leads it."""
    has_grpc = importlib.util.find_spec("grpc") is not None
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes must be 1 or more, got {nodes}")
    if nodes is not None and nodes > 1 and not has_grpc:
        raise UsageError(f"--nodes {nodes} needs agents, and they need gRPC: pip install 'gyrostat[cluster]'")
    if nodes is None:
        return 2 if has_grpc else 0
    return nodes if nodes > 1 else 0

"""`gyrostat chaos`: injects random faults into a job, and compares its result with that of an undisturbed run."""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli import log_options
from gyrostat.cli import run_options as given
from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.core import logs
from gyrostat.core.errors import UsageError

_RUN = (sys.executable, "-c", "from gyrostat.cli.main import main; main()", "run")
_HELP = "\n\n".join(
    [
        "Inject random faults into a job, and compare its result with that of an undisturbed run.",
        "  gyrostat chaos -n 8 -w 4 --minutes 5 --seed 1 train.py --epochs 2",
        "The job runs once undisturbed, then repeatedly while workers are killed and stopped, the job is resized, and the "
        "leading agent is killed. Choose arguments with which one run takes at least ten seconds.",
        "The runs are equal if each ends with the digest of the undisturbed run and every step has the same loss and samples. "
        "Exit code: 0 if they are equal, otherwise 1. A seed fixes the faults and their times; the workers they hit depend on "
        "the state of the job.",
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
    checkpoint_every: given.CheckpointEvery = 20,
    paced: given.Paced = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", show_default=False, help="Write the result as JSON."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Keep records, logs and checkpoints in DIR."),
    ] = None,
    verbose: log_options.Verbose = 0,
    log_format: log_options.Format = None,
) -> None:
    from gyrostat.cli.chaos_display import Printer, print_verdict
    from gyrostat.job.chaos.play import ChaosRequest, play
    from gyrostat.job.control.report import check_writable, write_json
    from gyrostat.job.processes.protocol import Program

    logs.configure(verbose, log_format)
    if json is not None:
        check_writable(json)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep}: the directory is not empty; give a new one")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leaves no process behind
    with tempfile.TemporaryDirectory(prefix="gyrostat-chaos-") as directory:
        request = ChaosRequest(
            run=_RUN,
            program=Program(name=script, module=module, args=tuple(args or ())),
            virtual_workers=virtual_workers or workers or 2,
            workers=workers or 2,
            directory=(keep or Path(directory)).absolute(),
            seed=seed,
            seconds=60 * minutes,
            faults=faults,
            every=every,
            nodes=_nodes(nodes),
            options=[] if paced is None else ["--paced", paced],
            checkpoint_every=checkpoint_every,
        )
        verdict = play(request, Printer())
    print_verdict(verdict)
    if json is not None:
        write_json(json, verdict.as_json())
    if not verdict.ok:
        raise typer.Exit(1)


def _nodes(wanted: int | None) -> int:
    has_grpc = importlib.util.find_spec("grpc") is not None
    if wanted is not None and wanted > 1 and not has_grpc:
        raise UsageError(
            f"--nodes {wanted} needs agents, and they need gRPC: pip install 'gyrostat[cluster]'"
        )
    return wanted if wanted is not None else 2 if has_grpc else 1

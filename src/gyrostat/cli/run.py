"""`gyrostat run`: one job on this machine, on a fixed number of workers or on one that changes by a schedule."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli import nodes as nodes_cli
from gyrostat.cli import options
from gyrostat.cli.display import LiveDisplay, PlainDisplay
from gyrostat.core.errors import UsageError
from gyrostat.core.job import Determinism, Reduction
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.outcome import Outcome
from gyrostat.job.protocol import Program
from gyrostat.job.report import check_writable, write_report
from gyrostat.job.runfile import holding
from gyrostat.job.stragglers import Reaction, StragglerPolicy

_HELP = "\n\n".join(
    [
        "Run one job on this machine.",
        "Options stand before the script; everything after it is the script's own.",
        "[bold]Examples[/bold]",
        "  gyrostat run --virtual-workers 4 --workers 2 train.py --epochs 3",
        "  gyrostat run --placement 3,1 train.py",
        "  gyrostat run -n 8 --checkpoint-dir ckpt --checkpoint-every 100 -m mypackage.train",
        "Virtual workers decide the result: it is, bit for bit, what plain DDP computes with that many "
        "processes. Workers only decide the speed.",
        "A run with --checkpoint-dir that was interrupted goes on from its last checkpoint when the same "
        "command is given again, on any number of workers. SIGUSR1, or `gyrostat checkpoint save DIR`, asks "
        "for a checkpoint now; SIGTERM or Ctrl-C for one and the end; a second Ctrl-C ends it at once.",
        "On several nodes, give the same command on each:",
        "  gyrostat run --store etcd://10.0.0.1:2379 --name mnist --nodes 2 -n 8 -w 4 train.py",
    ]
)

_JOB, _NODES, _CHECKPOINTS, _OUTPUT = "Job", "Several nodes", "Checkpoints", "Output"


def register(app: typer.Typer) -> None:
    app.command(
        "run",
        help=_HELP,
        short_help="Run one job on this machine.",
        context_settings={"allow_interspersed_args": False},
    )(run)


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", show_default=False, help="The training script.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", show_default=False, help="Its own arguments.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as with python -m.")
    ] = False,
    virtual_workers: Annotated[
        int | None,
        typer.Option(
            "--virtual-workers",
            "-n",
            metavar="N",
            show_default="as many as workers, or what the script says",
            help="Logical data-parallel ranks; they decide the result.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-w",
            metavar="P",
            show_default="1",
            help="Processes that share the virtual workers.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="3,1,…",
            show_default="as even as possible",
            help="How many virtual workers each worker runs.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            metavar="T",
            help="Threads of each worker; their number is part of the bits.",
            rich_help_panel=_JOB,
        ),
    ] = 1,
    reduction: Annotated[
        Reduction | None,
        typer.Option(
            show_default="ddp; tree on GPUs with NCCL",
            help="The order in which gradients are added.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    determinism: Annotated[
        Determinism, typer.Option(help="What may change without changing a bit.", rich_help_panel=_JOB)
    ] = Determinism.ELASTIC,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE,…",
            show_default=False,
            help="Device types that a heterogeneous job may mix: avx512, avx2, sse, or names of GPUs.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="the script's name and the process's number",
            help="By which `gyrostat scale` and `status` find it.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="STEP:P,…",
            show_default=False,
            help="Resize at these steps, without stopping: 0:2,50:4,100:1.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    paced: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,…",
            show_default=False,
            help="Wait instead of computing, as devices of so many samples/s would take; for measuring.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0,
            help="A worker that is sent SIGTERM leaves at a boundary, within S seconds.",
            rich_help_panel=_JOB,
        ),
    ] = 30.0,
    stragglers: Annotated[
        Reaction,
        typer.Option(
            help="A worker that is slower than the others is only reported, gets fewer virtual workers, or is removed.",
            rich_help_panel=_JOB,
        ),
    ] = Reaction.REPORT,
    straggler_factor: Annotated[
        float, typer.Option(metavar="X", help="It is so many times slower than usual …", rich_help_panel=_JOB)
    ] = 1.2,
    straggler_steps: Annotated[
        int, typer.Option(metavar="K", help="… in the median of K steps.", rich_help_panel=_JOB)
    ] = 10,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            show_default=False,
            help="Where agents agree on who leads: etcd://HOST:2379, or file:///DIR for several on one machine.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(metavar="K", help="Begin when so many agents are there.", rich_help_panel=_NODES),
    ] = 1,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="this machine's",
            help="This agent's name; each has its own.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            show_default="the address towards the store",
            help="Where other nodes reach this one.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default="$GYROSTAT_TOKEN",
            help="The secret that all agents and clients of the job share.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="An agent that is away for longer is given up, and its workers with it.",
            rich_help_panel=_NODES,
        ),
    ] = 60.0,
    lease: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="A leader that is silent for so long has lost the lease.",
            rich_help_panel=_NODES,
        ),
    ] = 5.0,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default=False, help="Where checkpoints are.", rich_help_panel=_CHECKPOINTS
        ),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            metavar="K", help="Write one every K steps; 0: on demand.", rich_help_panel=_CHECKPOINTS
        ),
    ] = 0,
    keep: Annotated[
        int, typer.Option(metavar="K", help="Keep the newest K.", rich_help_panel=_CHECKPOINTS)
    ] = 3,
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest valid one.", rich_help_panel=_CHECKPOINTS)
    ] = True,
    restarts: Annotated[
        int,
        typer.Option(
            metavar="R",
            min=0,
            help="If a worker dies, go on from the newest checkpoint, at most R times.",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = 3,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Write a JSON report.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Keep each worker's output in DIR/worker-N.log as well.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write where each step's time went, for chrome://tracing or Perfetto.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no summary.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    workers, entries = options.choose_schedule(schedule, virtual_workers, workers, placement)
    chosen, given = options.choose_placement(virtual_workers, workers, placement)
    if report is not None:
        check_writable(report)
    if trace is not None:
        check_writable(trace)
    request = RunRequest(
        program=Program(name=script, module=module, args=tuple(args or ())),
        placement=chosen,
        virtual_workers_given=given,
        threads=threads,
        reduction=reduction,
        determinism=determinism,
        pool=options.choose_pool(determinism, pool, threads),
        checkpoint=options.choose_checkpoint(checkpoint_dir, checkpoint_every, keep, resume),
        schedule=entries,
        restarts=restarts,
        paced=options.parse_paced(paced),
        grace_s=grace,
        stragglers=StragglerPolicy(reaction=stragglers, factor=straggler_factor, steps=straggler_steps),
        name=options.choose_name(name, script),
        log_dir=log_dir,
        trace=trace,
    )
    if store is not None:
        if name is None:
            raise UsageError("--store needs --name JOB, the same on every node")
        if report is not None:
            raise UsageError("--report is for a job on one machine; leave out --store or --report")
        code = nodes_cli.run_as_agent(
            request,
            PlainDisplay(request.placement, quiet=quiet),
            store=store,
            nodes=nodes,
            node=node,
            listen=listen,
            token_file=token_file,
            patience=patience,
            ttl=lease,
        )
        raise typer.Exit(code)
    outcome = _run_on_display(request, quiet=quiet)
    if report is not None:
        write_report(report, outcome, request)
    _finish(outcome)


def _run_on_display(request: RunRequest, *, quiet: bool) -> Outcome:
    request.check()
    with contextlib.ExitStack() as stack:
        if request.checkpoint is not None:
            stack.enter_context(holding(Path(request.checkpoint.directory), request.program.name))
        display = PlainDisplay(request.placement, quiet=quiet)
        if sys.stderr.isatty() and not quiet:
            display = live = LiveDisplay(request.placement)
            stack.callback(live.close)
        return run_job(request, observer=display, forward_signals=True)


def _finish(outcome: Outcome) -> None:
    """Say in one line what went wrong, and return the exit code."""
    problem = outcome.diverged if outcome.failure is None else str(outcome.failure)
    if problem is not None:
        print(f"gyrostat: error: {problem}", file=sys.stderr)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)

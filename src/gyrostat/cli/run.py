"""`gyrostat run`: one job on this machine, on a fixed number of workers or on one that changes by a schedule."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import typer

from gyrostat.cli import nodes as nodes_cli
from gyrostat.cli import options
from gyrostat.cli import run_options as given
from gyrostat.cli.display import LiveDisplay, PlainDisplay
from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.core.errors import UsageError
from gyrostat.core.job import Determinism, RecoveryMode
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.report import check_writable, write_report
from gyrostat.job.control.run_file import holding
from gyrostat.job.diagnostics.stragglers import Reaction, StragglerPolicy
from gyrostat.job.diagnostics.watchdog import Action, WatchdogPolicy
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import Program

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


def register(app: typer.Typer) -> None:
    app.command(
        "run",
        help=_HELP,
        short_help="Run one job on this machine.",
        context_settings={"allow_interspersed_args": False},
    )(run)


def run(
    script: Script,
    args: Args = None,
    module: Module = False,
    virtual_workers: given.VirtualWorkers = None,
    workers: given.Workers = None,
    placement: given.Placement = None,
    threads: given.Threads = 1,
    reduction: given.Reduction = None,
    determinism: given.Determinism = Determinism.ELASTIC,
    pool: given.Pool = None,
    name: given.Name = None,
    schedule: given.Schedule = None,
    paced: given.Paced = None,
    grace: given.Grace = 30.0,
    recovery: given.Recovery = RecoveryMode.PEERS,
    min_workers: given.Fewest = 1,
    heartbeats: given.Silence = 60.0,
    stragglers: given.Stragglers = Reaction.REPORT,
    straggler_factor: given.StragglerFactor = 1.2,
    straggler_steps: given.StragglerSteps = 10,
    straggler_pause: given.StragglerPause = 60.0,
    straggler_return: given.StragglerReturn = 600.0,
    watchdog: given.Watchdog = None,
    watchdog_action: given.WatchdogAction = Action.REPORT,
    store: given.Store = None,
    nodes: given.Nodes = 1,
    node: given.Node = None,
    listen: given.Listen = None,
    token_file: given.TokenFile = None,
    patience: given.Patience = 60.0,
    lease: given.Lease = 5.0,
    checkpoint_dir: given.CheckpointDir = None,
    checkpoint_every: given.CheckpointEvery = 0,
    keep: given.Keep = 3,
    resume: given.Resume = True,
    restarts: given.Restarts = 3,
    poison_limit: given.PoisonLimit = 3,
    report: given.Report = None,
    log_dir: given.LogDir = None,
    trace: given.Trace = None,
    quiet: given.Quiet = False,
) -> None:
    workers, entries = options.choose_schedule(schedule, virtual_workers, workers, placement)
    chosen, is_given = options.choose_placement(virtual_workers, workers, placement)
    if report is not None:
        check_writable(report)
    if trace is not None:
        check_writable(trace)
    request = RunRequest(
        program=Program(name=script, module=module, args=tuple(args or ())),
        placement=chosen,
        virtual_workers_given=is_given,
        threads=threads,
        reduction=reduction,
        determinism=determinism,
        pool=options.choose_pool(determinism, pool, threads),
        checkpoint=options.choose_checkpoint(checkpoint_dir, checkpoint_every, keep, resume),
        schedule=entries,
        restarts=restarts,
        recovery=recovery,
        min_workers=min_workers,
        heartbeat_timeout_s=heartbeats,
        poison_limit=poison_limit,
        paced=options.parse_paced(paced),
        grace_s=grace,
        stragglers=StragglerPolicy(
            reaction=stragglers,
            factor=straggler_factor,
            steps=straggler_steps,
            pause_s=straggler_pause,
            back_s=straggler_return,
        ),
        watchdog=None if watchdog is None else WatchdogPolicy(seconds=watchdog, action=watchdog_action),
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

"""`gyrostat run`: one job on this machine, or this node's agent of a job on several nodes."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gyrostat.cli import log_options, options, server_options
from gyrostat.cli import run_options as given
from gyrostat.cli.renamed import accepting
from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.core import logs
from gyrostat.core.errors import UsageError
from gyrostat.core.files import check_writable, make_directory
from gyrostat.core.job import Determinism, RecoveryMode, TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.core.roles import ServerRecovery, ServerRole
from gyrostat.job.diagnostics.stragglers import Reaction, StragglerPolicy
from gyrostat.job.diagnostics.watchdog import Action, WatchdogPolicy

if TYPE_CHECKING:
    from gyrostat.job.control.outcome import Outcome
    from gyrostat.job.control.run_request import RunRequest

_HELP = "\n\n".join(
    [
        "Run a training job on this machine, or on several nodes.",
        "Options stand before the script; all arguments after it are passed to the script.",
        "[bold]Examples[/bold]",
        "  gyrostat run --virtual-workers 4 --workers 2 train.py --epochs 3",
        "  gyrostat run --placement 3,1 train.py",
        "  gyrostat run -n 8 --checkpoint-dir ckpt --checkpoint-every 100 -m mypackage.train",
        "  gyrostat run --servers 2 --workers 4 recommender.py     (parameters on servers)",
        "Virtual workers decide the result: it is, bit for bit, what plain DDP computes with that many "
        "processes. Workers only decide the speed.",
        "With --checkpoint-dir, an interrupted run resumes from its newest checkpoint when the same command is "
        "given again, on any number of workers. SIGUSR1 or `gyrostat checkpoint save DIR` requests a checkpoint; "
        "SIGTERM or Ctrl-C requests one and ends the job; a second Ctrl-C ends it immediately.",
        "On several nodes, run the same command on each node:",
        "  gyrostat run --store etcd://10.0.0.1:2379 --name mnist --nodes 2 -n 8 -w 4 train.py",
    ]
)


def register(app: typer.Typer) -> None:
    app.command(
        "run",
        help=_HELP,
        cls=accepting({"--silence": "--heartbeat-timeout", "--patience": "--node-timeout"}),
        context_settings={"allow_interspersed_args": False},
    )(run)


def run(
    context: typer.Context,
    script: Script,
    args: Args = None,
    module: Module = False,
    virtual_workers: given.VirtualWorkers = None,
    workers: given.Workers = None,
    placement: given.Placement = None,
    servers: given.Servers = 0,
    server_cores: given.ServerCores = 1,
    server_recovery: given.ServerRecovery = ServerRecovery.EXACT,
    server_adjust: given.ServerAdjust = 60.0,
    record: given.Record = None,
    threads: given.Threads = 1,
    reduction: given.Reduction = None,
    determinism: given.Determinism = Determinism.ELASTIC,
    pool: given.Pool = None,
    name: given.Name = None,
    schedule: given.Schedule = None,
    paced: given.Paced = None,
    grace: given.Grace = 30.0,
    recovery: given.Recovery = RecoveryMode.PEERS,
    min_workers: given.MinWorkers = 1,
    heartbeat_timeout: given.HeartbeatTimeout = 60.0,
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
    node_timeout: given.NodeTimeout = 60.0,
    lease: given.Lease = 5.0,
    checkpoint_dir: given.CheckpointDir = None,
    checkpoint_every: given.CheckpointEvery = 0,
    checkpoint_interval: given.CheckpointInterval = 0.0,
    keep: given.Keep = 3,
    resume: given.Resume = True,
    restarts: given.Restarts = 3,
    poison_limit: given.PoisonLimit = 3,
    report: given.Report = None,
    log_dir: given.LogDir = None,
    trace: given.Trace = None,
    quiet: given.Quiet = False,
    verbose: log_options.Verbose = 0,
    log_format: log_options.Format = None,
) -> None:
    from gyrostat.job.control.failure_policy import FailurePolicy
    from gyrostat.job.control.report import write_report
    from gyrostat.job.control.run_request import OutputFiles, RunRequest, WorkerOverrides
    from gyrostat.job.processes.protocol import Program

    log_format = logs.configure(verbose, log_format)
    server_options.check_options(_set_by_user(context), servers)
    settings = None
    if servers:
        settings, entries = server_options.choose_servers(
            ServerRole(count=servers, cores=server_cores, recovery=server_recovery, adjust_s=server_adjust),
            workers,
            schedule,
            record,
        )
        chosen, is_given = options.choose_placement(virtual_workers or 1, 1, None)
        is_given = virtual_workers is not None
    else:
        workers, entries = options.choose_schedule(schedule, virtual_workers, workers, placement)
        chosen, is_given = options.choose_placement(virtual_workers, workers, placement)
    if report is not None:
        check_writable(report, "--report")
    if trace is not None:
        check_writable(trace, "--trace")
    if record is not None:
        check_writable(record, "--record")
    request = RunRequest(
        program=Program(name=script, module=module, args=tuple(args or ())),
        placement=chosen,
        options=TrainingOptions(
            virtual_workers_given=is_given,
            threads=threads,
            reduction=reduction,
            determinism=determinism,
            pool=options.choose_pool(determinism, pool, threads),
            recovery=recovery,
            checkpoint=options.choose_checkpoint(
                checkpoint_dir, checkpoint_every, checkpoint_interval, keep, resume
            ),
        ),
        failures=FailurePolicy(
            min_workers=min_workers,
            heartbeat_timeout_s=heartbeat_timeout,
            grace_s=grace,
            restarts=restarts,
            poison_limit=poison_limit,
            stragglers=StragglerPolicy(
                reaction=stragglers,
                factor=straggler_factor,
                steps=straggler_steps,
                pause_s=straggler_pause,
                back_s=straggler_return,
            ),
            watchdog=None if watchdog is None else WatchdogPolicy(seconds=watchdog, action=watchdog_action),
        ),
        output=OutputFiles(log_dir=log_dir, trace=trace),
        overrides=WorkerOverrides(paced=options.parse_paced(paced)),
        servers=settings,
        schedule=entries,
        name=options.choose_name(name, script),
    )
    request.check()
    if checkpoint_dir is not None:
        make_directory(checkpoint_dir, "--checkpoint-dir")
    if log_dir is not None:
        make_directory(log_dir, "--log-dir")
    if store is not None:
        from gyrostat.cli.display import PlainDisplay
        from gyrostat.cli.nodes import run_as_agent

        if name is None:
            raise UsageError("--store needs --name JOB, the same on every node")
        display = PlainDisplay(request.placement, quiet=quiet)
        if report is not None:
            write = partial(write_report, report, request=request)
            display = PlainDisplay(request.placement, quiet=quiet, write_report=write)
        code = run_as_agent(
            request,
            display,
            store=store,
            nodes=nodes,
            node=node,
            listen=listen,
            token_file=token_file,
            node_timeout=node_timeout,
            ttl=lease,
        )
        raise typer.Exit(code)
    if nodes != 1 or node is not None or listen is not None:
        raise UsageError(
            "--nodes, --node and --listen are for a job on several nodes, which needs a lease store: add --store ADDRESS, such "
            "as etcd://HOST:2379, or leave them out"
        )
    outcome = _run_on_display(request, quiet=quiet, live=log_format is not logs.LogFormat.JSON)
    if report is not None:
        write_report(report, outcome, request)
    _finish(outcome)


def _set_by_user(context: typer.Context) -> list[str]:
    """The parameters that were given on the command line."""
    return [
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]


def _run_on_display(request: RunRequest, *, quiet: bool, live: bool) -> Outcome:
    from gyrostat.cli.display import LiveDisplay, PlainDisplay
    from gyrostat.job.control.run_file import holding
    from gyrostat.job.launcher import run_job

    with contextlib.ExitStack() as stack:
        if (checkpoint := request.options.checkpoint) is not None:
            stack.enter_context(holding(Path(checkpoint.directory), request.program.name))
        shown, servers = request.placement, None
        if (settings := request.servers) is not None:
            shown, servers = Placement.even(settings.workers, settings.workers), settings.role.count
        display = PlainDisplay(shown, quiet=quiet)
        if live and sys.stderr.isatty() and not quiet:
            display = terminal = LiveDisplay(shown, servers=servers)
            stack.callback(terminal.close)
        return run_job(request, observer=display, forward_signals=True)


def _finish(outcome: Outcome) -> None:
    """Print a failure in one line, and exit with the code of the job."""
    problem = outcome.diverged if outcome.failure is None else str(outcome.failure)
    if problem is not None:
        logs.error(problem)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)

"""`gyrostat verify`: proves for a script that elastic, fixed and plain DDP runs give the same bits, or reports the first
difference and its likely causes.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli import log_options
from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.core import logs
from gyrostat.core.determinism import parse_pool
from gyrostat.core.files import check_writable
from gyrostat.core.job import ReductionOrder
from gyrostat.job.verify.plan import Against, default_placements, parse_placements

if TYPE_CHECKING:
    from gyrostat.job.verify.verdict import VerifyVerdict
    from gyrostat.job.verify.verifier import VerifyRequest

_HELP = "\n\n".join(
    [
        "Prove that a script gives the same bits on every placement.",
        "Runs it as plain DDP on N processes, on several placements of N virtual workers, and with a checkpoint near the "
        "middle and a resume on another placement. Compares digests of all tracked state every K steps, and every loss. On "
        "a difference, reports the first step and tensor, and likely causes.",
        "Options stand before the script; all arguments after it are passed to the script. The script runs about five "
        "times: use little data, or --steps.",
        "[bold]Examples[/bold]",
        "  gyrostat verify --virtual-workers 4 train.py --epochs 1",
        "  gyrostat verify -n 8 --workers 1,3,5+3 --steps 50 -m mypackage.train",
        "Exit code: 0 if all runs are equal, 1 if some differ, 2 for bad input; if the script fails, its own.",
    ]
)

_JOB, _COMPARISON, _OUTPUT = "Job", "Comparison", "Output"


def register(app: typer.Typer) -> None:
    app.command(
        "verify",
        help=_HELP,
        context_settings={"allow_interspersed_args": False},
    )(verify)


def verify(
    script: Script,
    virtual_workers: Annotated[
        int,
        typer.Option(
            "--virtual-workers",
            "-n",
            metavar="N",
            show_default=False,
            help="Number of virtual workers (data-parallel ranks); decides the result.",
            rich_help_panel=_JOB,
        ),
    ],
    args: Args = None,
    module: Module = False,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-w",
            metavar="P,…",
            show_default="N, N-1 and 1 on two, and 1",
            help="Placements to run: a number of workers, or the virtual workers of each worker (3+1).",
            rich_help_panel=_JOB,
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(metavar="T", help="Threads per worker; affects the bits.", rich_help_panel=_JOB)
    ] = 1,
    reduction: Annotated[
        ReductionOrder | None,
        typer.Option(
            show_default="ddp; tree on GPUs with NCCL",
            help="Order in which gradients are summed; with tree, DDP uses it through a hook.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE,…",
            show_default=False,
            help="Verify a heterogeneous job on these device types, such as avx512,avx2.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    against: Annotated[
        Against,
        typer.Option(
            help="Reference to compare with: torch's own DDP, or none.", rich_help_panel=_COMPARISON
        ),
    ] = Against.DDP,
    every: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Compare the state every K steps and at the end.",
            rich_help_panel=_COMPARISON,
        ),
    ] = 10,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            show_default="all",
            help="Run and compare only the first S steps.",
            rich_help_panel=_COMPARISON,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Write a JSON report.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            show_default=False,
            help="Show the output of workers, and log state changes (INFO); -vv: also details (DEBUG).",
            rich_help_panel=_OUTPUT,
        ),
    ] = 0,
    log_format: log_options.Format = None,
) -> None:
    from gyrostat.cli.verify_display import print_verdict
    from gyrostat.job.processes.protocol import Program
    from gyrostat.job.verify.verdict import write_report
    from gyrostat.job.verify.verifier import VerifyRequest

    log_format = logs.configure(verbose, log_format)
    placements = default_placements(virtual_workers)
    if workers is not None:
        placements = parse_placements(workers, virtual_workers)
    if report is not None:
        check_writable(report, "--report")
    request = VerifyRequest(
        program=Program(name=script, module=module, args=tuple(args or ())),
        placements=placements,
        against=against,
        every=every,
        steps=steps,
        threads=threads,
        reduction=reduction,
        pool=None if pool is None else parse_pool(pool, threads=threads),
    )
    verdict = _verify_on_display(request, verbose=verbose > 0, live=log_format is not logs.LogFormat.JSON)
    print_verdict(verdict, script)
    if report is not None:
        write_report(report, verdict)
    if verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


def _verify_on_display(request: VerifyRequest, *, verbose: bool, live: bool) -> VerifyVerdict:
    from gyrostat.cli.verify_display import LiveProgress, PlainProgress
    from gyrostat.job.processes.start import WorkerForkServer
    from gyrostat.job.verify.verifier import verify as run_verification

    request.check()
    with contextlib.ExitStack() as stack:
        progress = PlainProgress(verbose=verbose)
        if live and sys.stderr.isatty():
            progress = terminal = LiveProgress(verbose=verbose)
            stack.callback(terminal.close)
        parent = stack.enter_context(WorkerForkServer())
        parent.wait_until_ready()  # its start does not count as part of the first run
        return run_verification(request, parent=parent, observer=progress, forward_signals=True)

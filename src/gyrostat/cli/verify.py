"""`gyrostat verify`: proves on the user's own script that elastic = fixed = plain DDP, or names the first
difference and what is known to cause it.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.cli.verify_display import LiveProgress, PlainProgress, print_verdict
from gyrostat.core.determinism import parse_pool
from gyrostat.core.job import ReductionOrder
from gyrostat.job.control.report import check_writable
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerForkServer
from gyrostat.job.verify.plan import Against, default_placements, parse_placements
from gyrostat.job.verify.verdict import VerifyVerdict, write_report
from gyrostat.job.verify.verifier import VerifyRequest
from gyrostat.job.verify.verifier import verify as run_verification

_HELP = "\n\n".join(
    [
        "Prove that a script comes to the same bits however it is run.",
        "Runs it as plain DDP on N processes, on several placements of N virtual workers, and saved near the middle "
        "and resumed on another placement; compares digests of all tracked state every K steps, and every loss. On a "
        "difference, finds the first step and tensor, and says what is known to cause it.",
        "Options stand before the script; everything after it is the script's own. The script runs about five times: "
        "give it little data, or --steps.",
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
        short_help="Prove that a script comes to the same bits however it is run.",
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
            help="Logical data-parallel ranks; they decide the result.",
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
            help="Placements to try: a number of workers, or how many virtual workers each runs (3+1).",
            rich_help_panel=_JOB,
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(metavar="T", help="Threads of each worker; they decide bits.", rich_help_panel=_JOB)
    ] = 1,
    reduction: Annotated[
        ReductionOrder | None,
        typer.Option(
            show_default="ddp; tree on GPUs with NCCL",
            help="The order in which gradients are added; under tree, DDP gets it as a hook.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE,…",
            show_default=False,
            help="Verify it as a heterogeneous job on these device types, such as avx512,avx2.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    against: Annotated[
        Against, typer.Option(help="Also compare with torch's own DDP.", rich_help_panel=_COMPARISON)
    ] = Against.DDP,
    every: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Compare the state after every K steps, and at the end.",
            rich_help_panel=_COMPARISON,
        ),
    ] = 10,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            show_default="all",
            help="Run and compare the first S steps only.",
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
        bool, typer.Option("--verbose", "-v", help="Show what the workers print.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    placements = default_placements(virtual_workers)
    if workers is not None:
        placements = parse_placements(workers, virtual_workers)
    if report is not None:
        check_writable(report)
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
    verdict = _verify_on_display(request, verbose=verbose)
    print_verdict(verdict, script)
    if report is not None:
        write_report(report, verdict)
    if verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


def _verify_on_display(request: VerifyRequest, *, verbose: bool) -> VerifyVerdict:
    request.check()
    with contextlib.ExitStack() as stack:
        progress = PlainProgress(verbose=verbose)
        if sys.stderr.isatty():
            progress = live = LiveProgress(verbose=verbose)
            stack.callback(live.close)
        parent = stack.enter_context(WorkerForkServer())
        parent.wait_until_ready()  # so that its start is not counted as the first run's
        return run_verification(request, parent=parent, onlooker=progress, forward_signals=True)

"""`gyrostat chaos`: random faults on one's own job, and whether they left a trace in its result."""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gyrostat.cli import run_options as given
from gyrostat.cli.script_options import Args, Module, Script
from gyrostat.core.errors import UsageError
from gyrostat.job.chaos.play import ChaosObserver, ChaosRequest, play
from gyrostat.job.chaos.record import RecordedRun
from gyrostat.job.chaos.verdict import ChaosVerdict, Round, Struck
from gyrostat.job.control.report import check_writable, write_json
from gyrostat.job.processes.protocol import Program

_RUN = (sys.executable, "-c", "from gyrostat.cli.main import main; main()", "run")
_HELP = "\n\n".join(
    [
        "Inflict random faults on a job, and compare its result with that of an undisturbed run.",
        "  gyrostat chaos -n 8 -w 4 --minutes 5 --seed 1 train.py --epochs 2",
        "The job runs once undisturbed, then again and again while workers are killed and stopped, the job is resized, and the "
        "agent that leads it is lost. Give it arguments with which a run takes some ten seconds or more.",
        "The verdict is good if every run ends with the digest of the undisturbed one, and every step was made with the same "
        "loss and samples. The exit code is 0 then, else 1. The same seed brings the same faults; whom they hit depends on who "
        "is there at the time.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command(
        "chaos",
        help=_HELP,
        short_help="Inject failures into a job, and compare its result.",
        context_settings={"allow_interspersed_args": False},
    )(chaos)


def chaos(
    script: Script,
    args: Args = None,
    module: Module = False,
    virtual_workers: given.VirtualWorkers = None,
    workers: given.Workers = None,
    minutes: Annotated[float, typer.Option(metavar="M", help="No more faults after M minutes.")] = 1.0,
    faults: Annotated[
        int | None, typer.Option(metavar="K", show_default=False, help="At most K faults.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Decides which faults come, and when.")] = 0,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Between two faults, on average.")] = 2.0,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            show_default="2, or 1 without grpcio",
            help="Agents, one of which leads. With 1 the job has no agent that could be lost.",
        ),
    ] = None,
    checkpoint_every: given.CheckpointEvery = 20,
    paced: given.Paced = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", show_default=False, help="Write the verdict as JSON."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Keep notes, logs and checkpoints there."),
    ] = None,
) -> None:
    if json is not None:
        check_writable(json)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep}: that directory is not empty; name a new one")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # nothing is left running
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
        verdict = play(request, _Teller())
    _show(verdict)
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


class _Teller(ChaosObserver):
    """Says what happens, as it happens."""

    def undisturbed(self, recorded: RecordedRun) -> None:
        _say(
            f"undisturbed: {len(recorded.steps):,} steps, {recorded.samples:,} samples, digest {_digest(recorded)}"
        )

    def struck(self, struck: Struck) -> None:
        _say(f"{struck.at:7.1f} s, step {struck.step}: {struck.kind}: {struck.whom}")

    def round_over(self, round: Round) -> None:
        recorded = round.recorded
        _say(
            f"round over: {len(round.struck)} faults, {recorded.samples:,} samples, recovered {len(recorded.rescued)} times "
            f"from peers and {recorded.restored} times from a checkpoint, digest {_digest(recorded)}"
        )


def _say(line: str) -> None:
    print(f"gyrostat: {line}", file=sys.stderr, flush=True)


def _digest(recorded: RecordedRun) -> str:
    return ", ".join(sorted(recorded.digests)) or "none"


def _show(verdict: ChaosVerdict) -> None:
    console = Console(highlight=False)
    table = Table(title=f"{len(verdict.struck)} faults in {len(verdict.rounds)} rounds, seed {verdict.seed}")
    table.add_column("fault")
    for column in ("times", "until the next step: median", "longest"):
        table.add_column(column, justify="right")
    for kind, times in sorted(Counter(struck.kind for struck in verdict.struck).items()):
        waits = [
            struck.until_next_step
            for struck in verdict.struck
            if struck.kind == kind and struck.until_next_step is not None
        ]
        shown = (f"{1e3 * median(waits):,.0f} ms", f"{1e3 * max(waits):,.0f} ms") if waits else ("", "")
        table.add_row(kind, str(times), *shown)
    console.print(table)
    for number, round in enumerate(verdict.rounds):
        for difference in round.differences:
            console.print(f"round {number}: {difference}", markup=False)
    restored = sum(round.recorded.restored for round in verdict.rounds)
    rescued = sum(len(round.recorded.rescued) for round in verdict.rounds)
    if verdict.ok:
        console.print(
            f"verdict: equal. All {len(verdict.rounds)} runs ended with digest {_digest(verdict.undisturbed)}, every step "
            f"with the same loss and samples; {rescued} times they recovered from peers, {restored} times from a checkpoint.",
            soft_wrap=True,
        )
    else:
        console.print("verdict: NOT EQUAL")

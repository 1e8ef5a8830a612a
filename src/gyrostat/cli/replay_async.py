"""`gyrostat replay-async`: repeats a recorded asynchronous job in one process, with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli.script_options import Args, Module, Script

_HELP = "\n\n".join(
    [
        "Repeat an asynchronous job with parameter servers in one process: every batch sees the parameters that it saw, and "
        "updates are applied in the recorded order. So a run that no other run repeats can be debugged.",
        "  gyrostat run --servers 2 --workers 4 --record updates.json train.py",
        "  gyrostat replay-async updates.json train.py",
        "Give the script the arguments that it was recorded with. Exit code: 1 if the digest differs.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("replay-async", help=_HELP, context_settings={"allow_interspersed_args": False})(replay_async)


def replay_async(
    record: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="Of gyrostat run --record FILE.")
    ],
    script: Script,
    args: Args = None,
    module: Module = False,
) -> None:
    from gyrostat.core.job import Assignment, TrainingOptions
    from gyrostat.core.logs import note
    from gyrostat.core.placement import Placement
    from gyrostat.engine.script import session
    from gyrostat.engine.supervisor import NullSupervisor
    from gyrostat.job.processes.protocol import Program
    from gyrostat.job.processes.worker import run_program
    from gyrostat.ps.checkpoint.record import read_record
    from gyrostat.ps.client.replay import ReplayServers, replay_with

    recorded = read_record(record)
    servers = ReplayServers(recorded)
    replay_with(servers)
    alone = Assignment(placement=Placement.even(1, 1), options=TrainingOptions(virtual_workers_given=False))
    session.enter(alone, NullSupervisor())
    run_program(Program(name=script, args=tuple(args or ()), module=module))
    digest = servers.digest()
    session.finish()
    note(f"replayed {len(recorded.computations):,} batches; digest {digest}")
    if servers.left:
        note(
            f"{servers.left} recorded batches were not computed: the script ended before; replay the same script"
        )
        raise typer.Exit(1)
    if digest != recorded.digest:
        note(f"the recorded run had digest {recorded.digest}: these runs differ")
        raise typer.Exit(1)

"""`gyrostat replay`: replays the recorded decisions of a scheduler, or simulates the recorded jobs under other policies."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, At, console, print_json
from gyrostat.core.errors import UsageError
from gyrostat.core.files import check_writable
from gyrostat.core.plural import plural

if TYPE_CHECKING:
    from gyrostat.sched.recording import Replayed

_HELP = "\n\n".join(
    [
        "Replay recorded scheduling decisions on the recorded input, and compare actions, devices, order, reasons and times.",
        "  gyrostat replay                  (the running cluster, since its daemon started)",
        "  gyrostat replay ticks.jsonl      (a recording of a cluster, or of `gyrostat simulate --record`)",
        "  gyrostat replay --save FILE      (also save the running cluster's recording)",
        "With --policy, the recorded jobs are simulated under each of these policies instead:",
        "  gyrostat replay --policy fifo --policy wfs",
        "Only the recording is needed. Exit code: 1 if a plan differs.",
    ]
)


def register(app: typer.Typer) -> None:
    app.command("replay", help=_HELP)(replay)


def replay(
    recording: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", show_default="the running cluster's", help="Recording of ticks."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Write the running cluster's recording to FILE."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SETTING=VALUE,…]",
            show_default=False,
            help="Simulate the recorded jobs under this policy. May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    if recording is not None and save is not None:
        raise UsageError(f"--save is for the running cluster's recording; {recording} is already a file")
    with tempfile.TemporaryDirectory(prefix="gyrostat-replay-") as directory:
        path = recording or save or Path(directory) / "ticks.jsonl"
        if recording is None:
            from gyrostat.local.client import connect

            check_writable(path, "--save")
            with connect(at) as cluster:
                path.write_bytes(cluster.recording())
        if policy:
            _simulate(path, policy, as_json)
        else:
            print_replayed(decide_again(path), as_json)


def decide_again(recording: Path) -> Replayed:
    """Replay a recording with the scheduler that it names."""
    from gyrostat.sched.recording import replay as run
    from gyrostat.sim.setup import read_setup

    return run(recording, lambda setup: read_setup(setup).scheduler_state())


def _simulate(recording: Path, policies: list[str], as_json: bool) -> None:
    """Simulate the recorded jobs under each policy."""
    from gyrostat.cli.simulations import print_runs, run_setup
    from gyrostat.sim.cluster import Costs
    from gyrostat.sim.recorded import read_recorded
    from gyrostat.sim.report import ReportedRun
    from gyrostat.sim.summary import summarise

    found = read_recorded(recording)
    if not found.jobs:
        raise UsageError(f"no job of {recording} had ended: there is nothing to simulate")
    runs = []
    for policy in policies:
        setup = replace(found.setup, policy=policy)
        result = run_setup(setup, found.jobs, None, Costs(), lambda: [iter(found.changes)], policy)
        runs.append(ReportedRun(summarise(result, policy=policy, sharing=setup.sharing), result))
    if as_json:
        print_json([run.summary.to_json() for run in runs])
        return
    out = console()
    out.print(
        f"{plural(len(found.jobs), 'job')} of the recording; {found.unfinished} had not ended or never ran"
    )
    print_runs(out, runs)


def print_replayed(found: Replayed, as_json: bool = False) -> None:
    """Raises `typer.Exit` if a plan differs."""
    if as_json:
        print_json(found)
    elif found.difference is None:
        print(f"{found.ticks} ticks with {found.actions} actions: all plans equal")
    else:
        print(f"tick {found.difference.tick} at {found.difference.now} s differs")
        print(f"  recorded  {found.difference.recorded}")
        print(f"  replayed  {found.difference.replayed}")
    if found.difference is not None:
        raise typer.Exit(1)

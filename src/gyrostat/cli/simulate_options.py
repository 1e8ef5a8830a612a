"""The options of `gyrostat simulate`, each with what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Trace = Annotated[
    Path | None, typer.Argument(metavar="TRACE", show_default=False, help="A trace; not with --replay.")
]
Cluster = Annotated[
    str | None, typer.Option(metavar="CLUSTER", show_default=False, help="A cell file, or nodes.")
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:SETTING=VALUE,…][;VC=NAME…]",
        show_default="fifo",
        help="Which policy; several are run in turn. docs/reference/policies.md lists them.",
    ),
]
Sharing = Annotated[
    list[str] | None,
    typer.Option(
        metavar="cells|quota|private|flat",
        show_default="cells",
        help="How tenants share a cluster of cells; several are run in turn.",
    ),
]
Borrowing = Annotated[
    bool, typer.Option("--borrowing/--no-borrowing", help="Lend what a tenant does not use to others.")
]
Private = Annotated[
    bool,
    typer.Option(
        "--private/--no-private", help="Also run every tenant alone, and say who waits longer than that."
    ),
]
Tenants = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Divide a trace without tenants among N (by a fixed rule)."),
]
Days = Annotated[
    str | None,
    typer.Option(
        metavar="FROM-TO", show_default="all", help="Only jobs submitted on these days of the trace."
    ),
]
Profiles = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default="analytic scaling",
        help="Measured throughputs, for jobs with a workload.",
    ),
]
Truth = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default="--profiles",
        help="Throughputs that jobs really have; the scheduler learns them by measuring.",
    ),
]
MeasureAfter = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        min=0.0,
        show_default="30",
        help="With --truth: so long after getting other devices a job knows its speed.",
    ),
]
Overhead = Annotated[
    float,
    typer.Option(
        metavar="X", min=0.0, help="Analytic scaling: p devices are p / (1 + X(p-1)) times as fast."
    ),
]
StartTime = Annotated[
    float, typer.Option(metavar="S", min=0.0, help="A job starts to train so long after it gets devices.")
]
RescalePause = Annotated[
    float, typer.Option(metavar="S", min=0.0, help="A job stands still so long when its devices change.")
]
SpreadPenalty = Annotated[
    float, typer.Option(metavar="X", min=0.0, max=1.0, help="Speed lost per node more than needed.")
]
PackedSpeed = Annotated[
    float, typer.Option(metavar="X", min=0.01, max=1.0, help="Speed that a job keeps on shared devices.")
]
Serving = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE:LOW-HIGH",
        show_default="none",
        help="A serving load takes so many devices over the day.",
    ),
]
Failures = Annotated[
    str | None,
    typer.Option(
        metavar="HOURS:HOURS", show_default="none", help="Mean time to a node's failure, and its repair."
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(metavar="S", min=0.0, help="What a failed node costs a job at most; 0: nothing is lost."),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of failures and serving load.")]
Report = Annotated[
    Path | None,
    typer.Option(metavar="DIR", show_default=False, help="Write report.json and report.html there."),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False, help="Keep every observation and plan (one policy only)."
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Decide a recording again and compare."),
]

"""The options of `gyrostat simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Trace = Annotated[
    Path | None, typer.Argument(metavar="TRACE", show_default=False, help="Trace of jobs; not with --replay.")
]
Cluster = Annotated[
    str | None, typer.Option(metavar="CLUSTER", show_default=False, help="Cell file, or nodes.")
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:SETTING=VALUE,…][;VC=NAME…]",
        show_default="fifo",
        help="Scheduling policy; docs/reference/policies.md lists them. May be repeated.",
    ),
]
Sharing = Annotated[
    list[str] | None,
    typer.Option(
        metavar="cells|quota|private|flat",
        show_default="cells",
        help="How tenants share a cluster of cells. May be repeated.",
    ),
]
Borrowing = Annotated[
    bool, typer.Option("--borrowing/--no-borrowing", help="Lend idle devices of a tenant to others.")
]
Private = Annotated[
    bool,
    typer.Option(
        "--private/--no-private",
        help="Also simulate private clusters, and mark tenants that wait longer than there.",
    ),
]
Tenants = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Divide the jobs of a trace without tenants among N tenants."),
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
        help="Measured throughput of workloads.",
    ),
]
Truth = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default="--profiles",
        help="Actual throughput of jobs; the scheduler learns it by measurement.",
    ),
]
MeasureAfter = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        min=0.0,
        show_default="30",
        help="With --truth: seconds until a job has measured its throughput on new devices.",
    ),
]
Overhead = Annotated[
    float,
    typer.Option(
        metavar="X", min=0.0, help="Analytic scaling: the speedup of p devices is p / (1 + X(p-1))."
    ),
]
StartTime = Annotated[
    float, typer.Option(metavar="S", min=0.0, help="Seconds from getting devices to the first step.")
]
RescalePause = Annotated[
    float, typer.Option(metavar="S", min=0.0, help="Seconds that a job pauses when its devices change.")
]
SpreadPenalty = Annotated[
    float, typer.Option(metavar="X", min=0.0, max=1.0, help="Share of throughput lost per extra node.")
]
PackedSpeed = Annotated[
    float,
    typer.Option(
        metavar="X", min=0.01, max=1.0, help="Share of throughput that a job keeps on shared devices."
    ),
]
Serving = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE:LOW-HIGH",
        show_default="none",
        help="A diurnal serving load that takes LOW to HIGH devices.",
    ),
]
Failures = Annotated[
    str | None,
    typer.Option(
        metavar="HOURS:HOURS",
        show_default="none",
        help="Mean time between failures of a node, and mean time to repair.",
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(
        metavar="S",
        min=0.0,
        help="Checkpoint interval in seconds: the work that a failure can lose; 0: none.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of failures and serving load.")]
Report = Annotated[
    Path | None,
    typer.Option(metavar="DIR", show_default=False, help="Write report.json and report.html to DIR."),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False, help="Save every observation and plan (one policy only)."
    ),
]
Replay = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Replay a recording and compare."),
]

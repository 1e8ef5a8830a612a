"""The options of `gyrostat run`, each with what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyrostat.core.job import Determinism as Level
from gyrostat.core.job import RecoveryMode
from gyrostat.core.job import ReductionOrder as Order
from gyrostat.job.diagnostics.stragglers import Reaction
from gyrostat.job.diagnostics.watchdog import Action

_JOB, _NODES, _CHECKPOINTS, _OUTPUT = "Job", "Several nodes", "Checkpoints", "Output"

VirtualWorkers = Annotated[
    int | None,
    typer.Option(
        "--virtual-workers",
        "-n",
        metavar="N",
        show_default="as many as workers, or what the script says",
        help="Logical data-parallel ranks; they decide the result.",
        rich_help_panel=_JOB,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="P",
        show_default="1",
        help="Processes that share the virtual workers.",
        rich_help_panel=_JOB,
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(
        metavar="3,1,…",
        show_default="as even as possible",
        help="How many virtual workers each worker runs.",
        rich_help_panel=_JOB,
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        metavar="T",
        help="Threads of each worker; their number is part of the bits.",
        rich_help_panel=_JOB,
    ),
]
Reduction = Annotated[
    Order | None,
    typer.Option(
        show_default="ddp; tree on GPUs with NCCL",
        help="The order in which gradients are added.",
        rich_help_panel=_JOB,
    ),
]
Determinism = Annotated[
    Level, typer.Option(help="What may change without changing a bit.", rich_help_panel=_JOB)
]
Pool = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE,…",
        show_default=False,
        help="Device types that a heterogeneous job may mix: avx512, avx2, sse, or names of GPUs.",
        rich_help_panel=_JOB,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="the script's name and the process's number",
        help="By which `gyrostat scale` and `status` find it.",
        rich_help_panel=_JOB,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="STEP:P,…",
        show_default=False,
        help="Resize at these steps, without stopping: 0:2,50:4,100:1.",
        rich_help_panel=_JOB,
    ),
]
Paced = Annotated[
    str | None,
    typer.Option(
        metavar="RATE,…",
        show_default=False,
        help="Wait instead of computing, as devices of so many samples/s would take; for measuring.",
        rich_help_panel=_JOB,
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        metavar="S",
        min=0,
        help="A worker that is sent SIGTERM leaves at a boundary, within S seconds.",
        rich_help_panel=_JOB,
    ),
]
Stragglers = Annotated[
    Reaction,
    typer.Option(
        help="A worker that is slower than the others is only reported, gets fewer virtual workers, or is removed.",
        rich_help_panel=_JOB,
    ),
]
StragglerFactor = Annotated[
    float, typer.Option(metavar="X", help="It is so many times slower than usual …", rich_help_panel=_JOB)
]
StragglerSteps = Annotated[
    int, typer.Option(metavar="K", help="… in the median of K steps.", rich_help_panel=_JOB)
]
StragglerReturn = Annotated[
    float,
    typer.Option(
        metavar="S",
        min=0,
        help="The place of one that was removed is tried again after S seconds; 0: never.",
        rich_help_panel=_JOB,
    ),
]
StragglerPause = Annotated[
    float,
    typer.Option(
        metavar="S",
        min=0,
        help="At most one change in S seconds because of stragglers.",
        rich_help_panel=_JOB,
    ),
]
Watchdog = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        show_default=False,
        help="If no step is completed for S seconds, show the stack of every worker …",
        rich_help_panel=_JOB,
    ),
]
WatchdogAction = Annotated[
    Action,
    typer.Option(help="… and end the one that hangs in the script's code, or not.", rich_help_panel=_JOB),
]
Store = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        show_default=False,
        help="Where agents agree on who leads: etcd://HOST:2379, or file:///DIR for several on one machine.",
        rich_help_panel=_NODES,
    ),
]
Nodes = Annotated[
    int,
    typer.Option(metavar="K", help="Begin when so many agents are there.", rich_help_panel=_NODES),
]
Node = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="this machine's",
        help="This agent's name; each has its own.",
        rich_help_panel=_NODES,
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        show_default="the address towards the store",
        help="Where other nodes reach this one.",
        rich_help_panel=_NODES,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default="$GYROSTAT_TOKEN",
        help="The secret that all agents and clients of the job share.",
        rich_help_panel=_NODES,
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="An agent that is away for longer is given up, and its workers with it.",
        rich_help_panel=_NODES,
    ),
]
Lease = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="A leader that is silent for so long has lost the lease.",
        rich_help_panel=_NODES,
    ),
]
CheckpointDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", show_default=False, help="Where checkpoints are.", rich_help_panel=_CHECKPOINTS
    ),
]
CheckpointEvery = Annotated[
    int,
    typer.Option(metavar="K", help="Write one every K steps; 0: on demand.", rich_help_panel=_CHECKPOINTS),
]
Keep = Annotated[int, typer.Option(metavar="K", help="Keep the newest K.", rich_help_panel=_CHECKPOINTS)]
Resume = Annotated[bool, typer.Option(help="Go on from the newest valid one.", rich_help_panel=_CHECKPOINTS)]
Recovery = Annotated[
    RecoveryMode,
    typer.Option(
        help="If a worker dies: the others go on, with the same bits (peers); they go on without what it had computed, "
        "inexactly (approximate); or all start again from the newest checkpoint (checkpoint).",
        rich_help_panel=_JOB,
    ),
]
Fewest = Annotated[
    int,
    typer.Option(
        "--min-workers",
        metavar="P",
        help="With fewer workers left than that, wait for others before going on.",
        rich_help_panel=_JOB,
    ),
]
Silence = Annotated[
    float,
    typer.Option(
        "--silence",
        metavar="S",
        help="A worker that does not answer for S seconds (stopped, or cut off) counts as dead; 0: never.",
        rich_help_panel=_JOB,
    ),
]
Restarts = Annotated[
    int,
    typer.Option(
        metavar="R",
        min=0,
        help="If a worker dies, go on from the newest checkpoint, at most R times; sooner after progress than without.",
        rich_help_panel=_CHECKPOINTS,
    ),
]
PoisonLimit = Annotated[
    int,
    typer.Option(
        metavar="K",
        min=0,
        help="End the job when K workers have died of the same micro-batch; 0: never.",
        rich_help_panel=_CHECKPOINTS,
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Write a JSON report.", rich_help_panel=_OUTPUT),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="Keep each worker's output in DIR/worker-N.log as well.",
        rich_help_panel=_OUTPUT,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Write where each step's time went, for chrome://tracing or Perfetto.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, no summary.", rich_help_panel=_OUTPUT)
]

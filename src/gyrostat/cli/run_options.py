"""The options of `gyrostat run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli import job_options as shared
from gyrostat.core.job import Determinism as Level
from gyrostat.core.job import RecoveryMode
from gyrostat.core.job import ReductionOrder as Order
from gyrostat.core.roles import ServerRecovery as Loss
from gyrostat.job.diagnostics.stragglers import Reaction
from gyrostat.job.diagnostics.watchdog import Action

_JOB, _NODES, _CHECKPOINTS, _OUTPUT = "Job", "Several nodes", shared.CHECKPOINTS, "Output"
_SERVERS = shared.SERVERS

VirtualWorkers = Annotated[
    int | None,
    typer.Option(
        "--virtual-workers",
        "-n",
        metavar="N",
        show_default="the number of workers, or what the script sets",
        help="Number of virtual workers (data-parallel ranks); decides the result.",
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
        help="Number of worker processes, over which virtual workers are distributed.",
        rich_help_panel=_JOB,
    ),
]
Servers = Annotated[
    int,
    typer.Option(
        metavar="S",
        min=0,
        help="Number of parameter servers: workers train asynchronously, and come and go at any time; 0: none.",
        rich_help_panel=_SERVERS,
    ),
]
ServerCores = Annotated[int, shared.SERVER_CORES]
ServerRecovery = Annotated[Loss, shared.SERVER_RECOVERY]
ServerAdjust = Annotated[float, shared.SERVER_ADJUST]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Record the order of updates, for `gyrostat replay-async`.",
        rich_help_panel=_SERVERS,
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(
        metavar="3,1,…",
        show_default="as even as possible",
        help="Number of virtual workers on each worker.",
        rich_help_panel=_JOB,
    ),
]
Threads = Annotated[int, shared.THREADS]
Reduction = Annotated[Order | None, shared.REDUCTION]
Determinism = Annotated[Level, shared.DETERMINISM]
Pool = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE,…",
        show_default=False,
        help="Device types that a heterogeneous job may mix: avx512, avx2, sse, or GPU names.",
        rich_help_panel=_JOB,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="script name and process id",
        help="Name of the job, for `gyrostat status`, `scale` and others.",
        rich_help_panel=_JOB,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="STEP:P,…",
        show_default=False,
        help="Change the number of workers at these steps, without a restart: 0:2,50:4,100:1.",
        rich_help_panel=_JOB,
    ),
]
Paced = Annotated[
    str | None,
    typer.Option(
        metavar="RATE,…",
        show_default=False,
        help="Emulate devices with this throughput (samples/s) by waiting; for benchmarks.",
        rich_help_panel=_JOB,
    ),
]
Grace = Annotated[float, shared.GRACE]
Stragglers = Annotated[Reaction, shared.STRAGGLERS]
StragglerFactor = Annotated[float, shared.STRAGGLER_FACTOR]
StragglerSteps = Annotated[int, shared.STRAGGLER_STEPS]
StragglerReturn = Annotated[
    float,
    typer.Option(
        metavar="S",
        min=0,
        help="Seconds until a removed worker is replaced again; 0: never.",
        rich_help_panel=_JOB,
    ),
]
StragglerPause = Annotated[float, shared.STRAGGLER_PAUSE]
Watchdog = Annotated[float | None, shared.WATCHDOG]
WatchdogAction = Annotated[Action, shared.WATCHDOG_ACTION]
Store = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        show_default=False,
        help="Lease store for leader election: etcd://HOST:2379, or file:///DIR for agents on one machine.",
        rich_help_panel=_NODES,
    ),
]
Nodes = Annotated[
    int,
    typer.Option(metavar="K", help="Start when K agents have joined.", rich_help_panel=_NODES),
]
Node = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="host name",
        help="Name of this node; unique among the nodes of the job.",
        rich_help_panel=_NODES,
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        show_default="the local address used to reach the store",
        help="Address at which other nodes reach this node.",
        rich_help_panel=_NODES,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default="$GYROSTAT_TOKEN",
        help="File with the secret shared by all agents and clients of the job.",
        rich_help_panel=_NODES,
    ),
]
NodeTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Seconds without contact after which a node and its workers are considered lost.",
        rich_help_panel=_NODES,
    ),
]
Lease = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Duration of the leader's lease, in seconds.",
        rich_help_panel=_NODES,
    ),
]
CheckpointDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="Directory of the job's checkpoints.",
        rich_help_panel=_CHECKPOINTS,
    ),
]
CheckpointEvery = Annotated[int, shared.CHECKPOINT_EVERY]
CheckpointInterval = Annotated[float, shared.CHECKPOINT_INTERVAL]
Keep = Annotated[int, shared.KEEP]
Resume = Annotated[
    bool, typer.Option(help="Resume from the newest valid checkpoint.", rich_help_panel=_CHECKPOINTS)
]
Recovery = Annotated[RecoveryMode, shared.RECOVERY]
MinWorkers = Annotated[
    int,
    typer.Option(
        "--min-workers",
        metavar="P",
        help="Minimum number of workers; with fewer, the job waits for replacements.",
        rich_help_panel=_JOB,
    ),
]
HeartbeatTimeout = Annotated[float, shared.HEARTBEAT_TIMEOUT]
Restarts = Annotated[int, shared.RESTARTS]
PoisonLimit = Annotated[int, shared.POISON_LIMIT]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Write a JSON report.", rich_help_panel=_OUTPUT),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="Also write the output of each worker to DIR/worker-N.log.",
        rich_help_panel=_OUTPUT,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Write a trace of each step's phases, for Perfetto or chrome://tracing.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.", rich_help_panel=_OUTPUT)
]

"""The options of a job that `gyrostat run` and `gyrostat submit` share, each described once.

`run` has a default for each. `submit` sends only what is given, because a job file may say it too: `unset` is the same option
for it, with the cluster's default in its help.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import typer

OptionInfo = Any
"""What `typer.Option` returns is declared as Any there."""

_DETERMINISM, _FAILURES, CHECKPOINTS = "Determinism", "Failures", "Checkpoints"
SERVERS = "Parameter servers"


def unset(option: OptionInfo, default: str | bool) -> OptionInfo:
    """The same option without a value; `default`: what its help says (False: nothing)."""
    same = copy(option)
    same.show_default = default
    return same


SERVER_CORES: OptionInfo = typer.Option(
    metavar="C", min=1, help="Cores of each server: C processes.", rich_help_panel=SERVERS
)
SERVER_RECOVERY: OptionInfo = typer.Option(
    help="When a server dies: all parameters and shards go back to the last checkpoint (exact), only the lost ones do "
    "(partial), or copies on another server take over and nothing goes back (replica).",
    rich_help_panel=SERVERS,
)
SERVER_ADJUST: OptionInfo = typer.Option(
    metavar="SECONDS",
    min=0,
    help="Minimum seconds between two treatments of slow or overloaded servers; 0: they are left alone.",
    rich_help_panel=SERVERS,
)
THREADS: OptionInfo = typer.Option(
    metavar="T",
    help="Threads per worker; the number affects the bits of the result.",
    rich_help_panel=_DETERMINISM,
)
REDUCTION: OptionInfo = typer.Option(
    show_default="ddp; tree on GPUs with NCCL",
    help="Order in which gradients are summed.",
    rich_help_panel=_DETERMINISM,
)
DETERMINISM: OptionInfo = typer.Option(
    help="Determinism level: what may change without a change of bits.", rich_help_panel=_DETERMINISM
)
RECOVERY: OptionInfo = typer.Option(
    help="When a worker dies: survivors recover its state and keep the bits (peers), survivors drop its gradients and do "
    "not keep the bits (approximate), or the job restarts from the newest checkpoint (checkpoint).",
    rich_help_panel=_FAILURES,
)
HEARTBEAT_TIMEOUT: OptionInfo = typer.Option(
    metavar="SECONDS",
    help="Seconds without a heartbeat after which a worker is considered dead; 0: never.",
    rich_help_panel=_FAILURES,
)
GRACE: OptionInfo = typer.Option(
    metavar="S",
    min=0,
    help="Seconds that a worker has to leave at a step boundary after SIGTERM.",
    rich_help_panel=_FAILURES,
)
STRAGGLERS: OptionInfo = typer.Option(
    help="Action for a slow worker: report it, give it fewer virtual workers, or remove it.",
    rich_help_panel=_FAILURES,
)
STRAGGLER_FACTOR: OptionInfo = typer.Option(
    metavar="X", help="A worker is slow if it takes X times its usual time …", rich_help_panel=_FAILURES
)
STRAGGLER_STEPS: OptionInfo = typer.Option(
    metavar="K", help="… in the median over K steps.", rich_help_panel=_FAILURES
)
STRAGGLER_PAUSE: OptionInfo = typer.Option(
    metavar="S",
    min=0,
    help="Minimum seconds between two changes because of slow workers.",
    rich_help_panel=_FAILURES,
)
WATCHDOG: OptionInfo = typer.Option(
    metavar="S",
    show_default=False,
    help="If no step completes for S seconds, print the stack of every worker …",
    rich_help_panel=_FAILURES,
)
WATCHDOG_ACTION: OptionInfo = typer.Option(
    help="… and only report, or kill the worker that hangs in the script's code.", rich_help_panel=_FAILURES
)
CHECKPOINT_EVERY: OptionInfo = typer.Option(
    metavar="K",
    help="Write a checkpoint every K steps; 0: not by steps.",
    rich_help_panel=CHECKPOINTS,
)
CHECKPOINT_INTERVAL: OptionInfo = typer.Option(
    metavar="SECONDS",
    help="Write a checkpoint every SECONDS, less often if they cost over 1 % of the time; 0: not by time.",
    rich_help_panel=CHECKPOINTS,
)
KEEP: OptionInfo = typer.Option(
    metavar="K", help="Number of checkpoints to keep.", rich_help_panel=CHECKPOINTS
)
RESTARTS: OptionInfo = typer.Option(
    metavar="R",
    min=0,
    help="Maximum number of restarts, from the newest checkpoint or the start; the delay is shorter after progress.",
    rich_help_panel=_FAILURES,
)
POISON_LIMIT: OptionInfo = typer.Option(
    metavar="K",
    min=0,
    help="Fail the job when the same micro-batch has killed K workers; 0: never.",
    rich_help_panel=_FAILURES,
)

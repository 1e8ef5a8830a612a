"""The options of `gyrostat submit`, and the parsers of values such as `90m`, `2G` and `NAME=VALUE`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gyrostat.cli import job_options as shared
from gyrostat.core import job as core
from gyrostat.core.errors import UsageError
from gyrostat.core.files import read_text
from gyrostat.core.roles import ServerRecovery as Loss
from gyrostat.job.diagnostics.stragglers import Reaction
from gyrostat.job.diagnostics.watchdog import Action

_SIZE, _PLACE, _RANK, _LIMITS = "Size", "Placement", "Priority", "Limits and retries"

Name = Annotated[
    str | None, typer.Option(metavar="NAME", show_default="the script's", help="Name of the job.")
]
VirtualWorkers = Annotated[
    int | None,
    typer.Option(
        "--virtual-workers",
        "-n",
        metavar="N",
        show_default="1",
        help="Number of virtual workers; decides the result, on any devices.",
        rich_help_panel=_SIZE,
    ),
]
Min = Annotated[
    int | None,
    typer.Option(
        "--min", metavar="P", show_default="1", help="Minimum number of devices.", rich_help_panel=_SIZE
    ),
]
Max = Annotated[
    int | None,
    typer.Option(
        "--max",
        metavar="P",
        show_default="one per virtual worker",
        help="Maximum number of devices.",
        rich_help_panel=_SIZE,
    ),
]
Servers = Annotated[
    int | None,
    typer.Option(
        metavar="S",
        show_default=False,
        help="Number of parameter servers: workers train asynchronously, and come and go at any time.",
        rich_help_panel=shared.SERVERS,
    ),
]
MostWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="P",
        show_default="--min",
        help="Maximum number of workers of a job with servers: as --max, one worker per device.",
        rich_help_panel=shared.SERVERS,
    ),
]
ServerCores = Annotated[int | None, shared.unset(shared.SERVER_CORES, "1")]
ServerMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        show_default=False,
        help="Memory that each server needs: 512M, 4G.",
        rich_help_panel=shared.SERVERS,
    ),
]
ServerAdjust = Annotated[float | None, shared.unset(shared.SERVER_ADJUST, "60")]
ServerRecovery = Annotated[Loss | None, shared.unset(shared.SERVER_RECOVERY, "exact")]
Types = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE,…",
        show_default="any",
        help="Device types, the preferred first.",
        rich_help_panel=_PLACE,
    ),
]
MixTypes = Annotated[
    bool | None,
    typer.Option("--mix-types", help="The job may use several device types at once.", rich_help_panel=_PLACE),
]
Cpu = Annotated[
    float | None,
    typer.Option(metavar="CPUS", show_default=False, help="Minimum CPUs per device.", rich_help_panel=_PLACE),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        show_default=False,
        help="Minimum memory per device: 512M, 4G.",
        rich_help_panel=_PLACE,
    ),
]
Workdir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default="the current directory",
        help="Working directory; the script's path is relative to it.",
        rich_help_panel=_PLACE,
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        show_default=False,
        help="Environment variable of the workers; NAME alone copies the current value. May be repeated.",
        rich_help_panel=_PLACE,
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        show_default="0",
        help="Priority within the VC; higher is more urgent.",
        rich_help_panel=_RANK,
    ),
]
Vc = Annotated[
    str | None,
    typer.Option(
        "--vc", metavar="VC", show_default="your own", help="Virtual cluster.", rich_help_panel=_RANK
    ),
]
Opportunistic = Annotated[
    bool | None,
    typer.Option(
        "--opportunistic",
        help="Run on idle devices only; preempted by jobs with guarantees.",
        rich_help_panel=_RANK,
    ),
]
Retries = Annotated[
    int | None,
    typer.Option(
        metavar="R",
        show_default="0",
        help="Maximum number of restarts after a failure; permanent errors are not retried.",
        rich_help_panel=_LIMITS,
    ),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        show_default="none",
        help="Maximum time with devices: 90s, 30m, 12h, 2d.",
        rich_help_panel=_LIMITS,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS", show_default=False, help="Expected number of steps.", rich_help_panel=_RANK
    ),
]
Workload = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="Name of the workload in throughput tables.",
        rich_help_panel=_RANK,
    ),
]
Threads = Annotated[int | None, shared.unset(shared.THREADS, "1")]
Reduction = Annotated[core.ReductionOrder | None, shared.unset(shared.REDUCTION, False)]
Determinism = Annotated[core.Determinism | None, shared.unset(shared.DETERMINISM, "elastic")]
Recovery = Annotated[core.RecoveryMode | None, shared.unset(shared.RECOVERY, "peers")]
HeartbeatTimeout = Annotated[float | None, shared.unset(shared.HEARTBEAT_TIMEOUT, "60")]
Grace = Annotated[float | None, shared.unset(shared.GRACE, "30")]
Stragglers = Annotated[Reaction | None, shared.unset(shared.STRAGGLERS, "report")]
StragglerFactor = Annotated[float | None, shared.unset(shared.STRAGGLER_FACTOR, "1.2")]
StragglerSteps = Annotated[int | None, shared.unset(shared.STRAGGLER_STEPS, "10")]
StragglerPause = Annotated[float | None, shared.unset(shared.STRAGGLER_PAUSE, "60")]
Watchdog = Annotated[float | None, shared.unset(shared.WATCHDOG, False)]
WatchdogAction = Annotated[Action | None, shared.unset(shared.WATCHDOG_ACTION, "report")]
CheckpointEvery = Annotated[int | None, shared.unset(shared.CHECKPOINT_EVERY, "not by steps")]
CheckpointInterval = Annotated[float | None, shared.unset(shared.CHECKPOINT_INTERVAL, "300")]
Keep = Annotated[int | None, shared.unset(shared.KEEP, "3")]
Restarts = Annotated[int | None, shared.unset(shared.RESTARTS, "3")]
PoisonLimit = Annotated[int | None, shared.unset(shared.POISON_LIMIT, "3")]

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def parse_time(text: str) -> float:
    """`90`, `90s`, `30m`, `1.5h`, `2d` in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UsageError(f"--time-limit is a time above 0 such as 90s, 30m, 12h or 2d; got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def parse_size(text: str) -> int:
    """`512M`, `4G`, `4GiB` in bytes, counted by 1024."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise UsageError(f"--memory is a size such as 512M or 4G; got {text!r}")
    return int(float(match[1]) * (1 << _BYTES[match[2]]))


def parse_env(given: Iterable[str], here: Mapping[str, str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for its value in `here`."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            if name not in here:
                raise UsageError(
                    f"--env {name} copies the current value of {name}, but it is not set; use {name}=VALUE"
                )
            value = here[name]
        found[name] = value
    return found


def read_job_file(path: Path) -> dict[str, Any]:
    """The fields of a job file. `workdir` is relative to the directory of the file, which is its default."""
    import yaml

    try:
        content = yaml.safe_load(read_text(path, "the job file"))
    except yaml.YAMLError as error:
        raise UsageError(f"the job file {path} is not YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"the job file {path} must have fields such as `script: train.py`")
    for name in ("memory", "server_memory"):
        if isinstance(content.get(name), str):
            content[name] = parse_size(content[name])
    if isinstance(content.get("time_limit"), str):
        content["time_limit"] = parse_time(content["time_limit"])
    workdir = content.get("workdir", ".")
    if isinstance(workdir, str):
        content["workdir"] = str((path.absolute().parent / workdir).resolve())
    return content

"""`gyrostat submit`: submit a job to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyrostat.cli import environment
from gyrostat.cli import submit_options as given
from gyrostat.cli.cluster_options import AsJson, At, plain, print_json
from gyrostat.cli.script_options import Args, Module
from gyrostat.core.errors import UsageError
from gyrostat.core.logs import error, note

if TYPE_CHECKING:
    from gyrostat.cluster.client import ClusterClient
    from gyrostat.cluster.job_spec import JobSpec
    from gyrostat.cluster.records import JobRecord

_HELP = "\n\n".join(
    [
        "Submit a job to the cluster. The scheduler decides when it runs and on which devices.",
        "Options stand before the script; all arguments after it are passed to the script.",
        "[bold]Examples[/bold]",
        "  gyrostat submit -n 8 train.py --epochs 3               (8 virtual workers on 1 to 8 devices)",
        "  gyrostat submit -n 8 --min 2 --max 4 --priority 5 --name mnist train.py",
        "  gyrostat submit --opportunistic --retries 3 --time-limit 12h -m mypackage.train",
        "  gyrostat submit --servers 2 --workers 4 recommender.py (parameters on servers, up to 4 workers)",
        "  gyrostat submit job.yaml                               (a job file)",
        "A job.yaml has the options as fields, with `_` for `-`: script, args, virtual_workers, min, max, types … Options "
        "of the command line take precedence.",
        "When the command returns, the job is stored and survives a restart of the daemon. A job that can never run is "
        "refused, with the reason.",
    ]
)

_JOB_FILES = (".yaml", ".yml")


def register(app: typer.Typer) -> None:
    app.command(
        "submit",
        help=_HELP,
        context_settings={"allow_interspersed_args": False},
    )(submit)


def submit(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", show_default=False, help="The training script, or a job file (YAML)."
        ),
    ],
    args: Args = None,
    module: Module = False,
    name: given.Name = None,
    virtual_workers: given.VirtualWorkers = None,
    min: given.Min = None,
    max: given.Max = None,
    servers: given.Servers = None,
    workers: given.MostWorkers = None,
    server_cores: given.ServerCores = None,
    server_memory: given.ServerMemory = None,
    server_recovery: given.ServerRecovery = None,
    server_adjust: given.ServerAdjust = None,
    types: given.Types = None,
    mix_types: given.MixTypes = None,
    cpu: given.Cpu = None,
    memory: given.Memory = None,
    workdir: given.Workdir = None,
    env: given.Env = None,
    priority: given.Priority = None,
    vc: given.Vc = None,
    opportunistic: given.Opportunistic = None,
    steps: given.Steps = None,
    workload: given.Workload = None,
    retries: given.Retries = None,
    time_limit: given.TimeLimit = None,
    threads: given.Threads = None,
    reduction: given.Reduction = None,
    determinism: given.Determinism = None,
    recovery: given.Recovery = None,
    heartbeat_timeout: given.HeartbeatTimeout = None,
    grace: given.Grace = None,
    stragglers: given.Stragglers = None,
    straggler_factor: given.StragglerFactor = None,
    straggler_steps: given.StragglerSteps = None,
    straggler_pause: given.StragglerPause = None,
    watchdog: given.Watchdog = None,
    watchdog_action: given.WatchdogAction = None,
    checkpoint_every: given.CheckpointEvery = None,
    checkpoint_interval: given.CheckpointInterval = None,
    keep: given.Keep = None,
    restarts: given.Restarts = None,
    poison_limit: given.PoisonLimit = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print the output of the job, and exit with its exit code.")
    ] = False,
    as_json: AsJson = False,
    at: At = None,
) -> None:
    from gyrostat.local.client import connect

    options: dict[str, Any] = {
        "module": module or None,
        "name": name,
        "virtual_workers": virtual_workers,
        "min": min,
        "max": _most_workers(servers, workers, max),
        "servers": servers,
        "server_cores": server_cores,
        "server_memory": None if server_memory is None else given.parse_size(server_memory),
        "server_recovery": server_recovery,
        "server_adjust": server_adjust,
        "types": None if types is None else tuple(filter(None, types.split(","))),
        "mix_types": mix_types,
        "cpu": cpu,
        "memory": None if memory is None else given.parse_size(memory),
        "workdir": None if workdir is None else str(workdir.resolve()),
        "env": None if env is None else given.parse_env(env, environment.variables()),
        "priority": priority,
        "vc": vc,
        "opportunistic": opportunistic,
        "steps": steps,
        "workload": workload,
        "retries": retries,
        "time_limit": None if time_limit is None else given.parse_time(time_limit),
        "threads": threads,
        "reduction": reduction,
        "determinism": determinism,
        "recovery": recovery,
        "heartbeat_timeout": heartbeat_timeout,
        "grace": grace,
        "stragglers": stragglers,
        "straggler_factor": straggler_factor,
        "straggler_steps": straggler_steps,
        "straggler_pause": straggler_pause,
        "watchdog": watchdog,
        "watchdog_action": watchdog_action,
        "checkpoint_every": checkpoint_every,
        "checkpoint_interval": checkpoint_interval,
        "keep": keep,
        "restarts": restarts,
        "poison_limit": poison_limit,
    }
    spec = make_spec(script, tuple(args or ()), options)
    with connect(at) as cluster:
        job = cluster.submit(spec)
        if as_json:
            print_json(job)
        elif follow:
            note(f"submitted {job.name} as {job.id}")
        else:
            print(f"submitted {job.name} as {job.id}; to watch it: gyrostat logs -f {job.id}")
        if follow:
            _follow(cluster, job, quiet=as_json)


def _most_workers(servers: int | None, workers: int | None, max: int | None) -> int | None:
    """`--workers` is `--max` of a job with servers."""
    if workers is None:
        return max
    if servers is None:
        raise UsageError("--workers is for a job with servers; for other jobs say --max P")
    if max is not None and max != workers:
        raise UsageError(f"--workers {workers} and --max {max} are two names of one number: give one")
    return workers


def make_spec(script: str, args: tuple[str, ...], options: dict[str, Any]) -> JobSpec:
    """The options of the command line take precedence over the fields of a job file."""
    from gyrostat.cluster.job_spec import read_spec

    fields: dict[str, Any]
    if script.endswith(_JOB_FILES) and not options["module"]:
        fields = given.read_job_file(Path(script))
        if args:
            fields["args"] = args
    else:
        fields = {"script": script, "args": args, "workdir": str(Path.cwd())}
    fields |= {name: value for name, value in options.items() if value is not None}
    if "script" not in fields:
        raise UsageError(f"the job file {script} has no script: add `script: train.py`")
    return read_spec(fields)


def _follow(cluster: ClusterClient, job: JobRecord, *, quiet: bool) -> None:
    """Print the output of the job until it ends, and exit with its exit code."""
    from gyrostat.cluster.records import JobState

    for line in cluster.logs(job.id, follow=True):
        if not quiet:
            print(line, flush=True)
    ended = cluster.status(job.id).job
    if ended.state is not JobState.FINISHED:
        why = plain(ended.failure or ended.reason)
        error(f"{ended.name} ({ended.id}) {ended.state}: {why}")
        raise typer.Exit(ended.exit_code or 1)
    if not quiet:
        digest = "" if ended.digest is None else f", digest {ended.digest}"
        note(f"{ended.name} ({ended.id}) {ended.state} after step {ended.step}{digest}")

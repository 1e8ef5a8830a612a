"""Jobs, devices and events of a cluster, as its database, its API and its clients exchange them.

`JobSpec` is what an owner submits, `JobRecord` its state and progress. A job's state changes along `NEXT` only:

    queued → starting → running → finished
                ↑           ↓ ↘ failed
             suspended ← (preempted)

A `suspended` job was running and lost its devices: it waits in the queue with its checkpoint. A `paused` job was taken out
of the queue by its owner. `finished`, `failed` and `cancelled` are final.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gyrostat.core.determinism import parse_pool
from gyrostat.core.errors import UsageError, WrongState
from gyrostat.core.job import CheckpointPolicy, Determinism, RecoveryMode, ReductionOrder, TrainingOptions
from gyrostat.core.plural import plural
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.diagnostics.poison import LIMIT as POISON_LIMIT
from gyrostat.job.diagnostics.stragglers import Reaction, StragglerPolicy
from gyrostat.job.diagnostics.watchdog import Action, WatchdogPolicy

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VARIABLES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DEFAULT_VC = "default"

# Every value of a job is bounded: it reaches timers, tables and processes that have limits of their own.
Workers = Annotated[int, Meta(ge=1, le=1 << 16)]
Steps = Annotated[int, Meta(ge=1, le=10**12)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Cpus = Annotated[float, Meta(ge=0, le=1e6)]
LONGEST_S = 10 * 365 * 24 * 3600.0
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
Wait = Annotated[float, Meta(ge=0, le=LONGEST_S)]
Limit = Annotated[int, Meta(ge=0, le=1000)]
Name = Annotated[str, Meta(max_length=256)]
FilePath = Annotated[str, Meta(min_length=1, max_length=4096)]
Variable = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1 << 16)]
"""An argument, or the value of an environment variable: Linux allows twice this."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as its owner submits it; `job.yaml` has the same fields."""

    script: Annotated[FilePath, Meta(description="The training script, from `workdir`.")]
    args: Annotated[tuple[Text, ...], Meta(max_length=4096, description="The script's own arguments.")] = ()
    module: Annotated[bool, Meta(description="`script` is a module, as with python -m.")] = False
    name: Annotated[Name | None, Meta(description="By default the script's.")] = None
    virtual_workers: Annotated[
        Workers, Meta(description="Number of logical ranks; it decides the result.")
    ] = 1
    min: Annotated[Workers, Meta(description="Fewest devices it runs on.")] = 1
    max: Annotated[Workers | None, Meta(description="Most devices; by default one per virtual worker.")] = (
        None
    )
    types: Annotated[
        tuple[Name, ...],
        Meta(max_length=64, description="Device types it may use, best first; by default any."),
    ] = ()
    mix_types: Annotated[bool, Meta(description="Whether it may use several types at once.")] = False
    cpu: Annotated[Cpus | None, Meta(description="CPUs that a device must have for it.")] = None
    memory: Annotated[Bytes | None, Meta(description="Bytes of memory that a device must have.")] = None
    priority: Annotated[
        int, Meta(ge=0, le=1000, description="Within its virtual cluster; more is more urgent.")
    ] = 0
    vc: Annotated[Name | None, Meta(description="Virtual cluster; by default its tenant's.")] = None
    opportunistic: Annotated[
        bool, Meta(description="Uses only devices that no other job uses, and leaves when one does.")
    ] = False
    retries: Annotated[
        int, Meta(ge=0, le=1000, description="How often it is started again after it failed.")
    ] = 0
    time_limit: Annotated[Seconds | None, Meta(description="Seconds with devices, in all.")] = None
    env: Annotated[Mapping[Variable, Text], Meta(max_length=1024, description="Set for its workers.")] = {}
    workdir: Annotated[FilePath, Meta(description="An absolute path.")] = "/"
    threads: Annotated[int, Meta(ge=1, le=4096, description="Of every worker; the result depends on it.")] = 1
    reduction: ReductionOrder | None = None
    determinism: Determinism = Determinism.ELASTIC
    checkpoint_every: Annotated[
        int, Meta(ge=0, le=10**12, description="Steps between checkpoints; 0: not by steps.")
    ] = 0
    checkpoint_interval: Annotated[
        Wait,
        Meta(
            description="Seconds between checkpoints, more if they cost over 1 % of the time; 0: not by time. Without both, "
            "one is written when it has to stop.",
        ),
    ] = 300.0
    keep: Annotated[int, Meta(ge=1, le=1000, description="Number of newest checkpoints that are kept.")] = 3
    recovery: Annotated[RecoveryMode, Meta(description="What happens when a worker dies.")] = (
        RecoveryMode.PEERS
    )
    restarts: Annotated[
        Limit, Meta(description="How often it restarts from a checkpoint before that counts as a failure.")
    ] = 3
    poison_limit: Annotated[
        Limit, Meta(description="Workers that one micro-batch may kill before the job fails; 0: any number.")
    ] = POISON_LIMIT
    heartbeat_timeout: Annotated[
        Wait, Meta(description="Seconds after which a worker that does not answer counts as dead; 0: never.")
    ] = 60.0
    grace: Annotated[Wait, Meta(description="Seconds that a worker has to leave at a boundary.")] = 30.0
    watchdog: Annotated[
        Seconds | None,
        Meta(description="Seconds without a step after which stacks are logged; null: never."),
    ] = None
    watchdog_action: Annotated[Action, Meta(description="Whether workers that hang are killed then.")] = (
        Action.REPORT
    )
    stragglers: Annotated[
        Reaction, Meta(description="Reaction to a slow worker: report, or re-place its virtual workers.")
    ] = Reaction.REPORT
    straggler_factor: Annotated[
        float,
        Meta(gt=1, le=1000, description="A worker is slow if it takes this many times its usual time …"),
    ] = 1.2
    straggler_steps: Annotated[
        int, Meta(ge=1, le=100, description="… in the median over this many steps.")
    ] = 10
    straggler_pause: Annotated[
        Wait, Meta(description="Seconds between two changes because of slow workers, at least.")
    ] = 60.0
    steps: Annotated[
        Steps | None, Meta(description="Total number of steps, if known; some policies use it.")
    ] = None
    workload: Annotated[Name | None, Meta(description="Its name in throughput tables.")] = None

    @property
    def title(self) -> str:
        """Its name, or the script's."""
        if self.name is not None:
            return self.name
        stem = self.script.rpartition(".")[2] if self.module else PurePosixPath(self.script).stem
        return re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-")[:64] or "job"

    @property
    def largest(self) -> int:
        return self.virtual_workers if self.max is None else self.max

    def training_options(self, checkpoints: Path) -> TrainingOptions:
        """How it trains. `checkpoints` is the directory of its checkpoints."""
        return TrainingOptions(
            threads=self.threads,
            reduction=self.reduction,
            determinism=self.determinism,
            recovery=self.recovery,
            pool=(
                parse_pool(",".join(self.types), threads=self.threads)
                if self.determinism is Determinism.HETEROGENEOUS
                else None
            ),
            checkpoint=CheckpointPolicy(
                directory=str(checkpoints),
                every=self.checkpoint_every,
                interval_s=self.checkpoint_interval,
                keep=self.keep,
            ),
        )

    def failure_policy(self) -> FailurePolicy:
        """What happens when its workers fail. The scheduler, not its leader, sees to its minimum of devices."""
        return FailurePolicy(
            heartbeat_timeout_s=self.heartbeat_timeout,
            grace_s=self.grace,
            restarts=self.restarts,
            poison_limit=self.poison_limit,
            stragglers=StragglerPolicy(
                # On several device types shares follow measured speed; the pause and the gain of a change limit how often.
                reaction=Reaction.REPLACE
                if self.mix_types and self.stragglers is Reaction.REPORT
                else self.stragglers,
                factor=self.straggler_factor,
                steps=self.straggler_steps,
                pause_s=self.straggler_pause,
            ),
            watchdog=(
                None
                if self.watchdog is None
                else WatchdogPolicy(seconds=self.watchdog, action=self.watchdog_action)
            ),
        )

    def check(self) -> JobSpec:
        """Itself; raises `UsageError` if it is invalid on any cluster."""
        try:
            msgspec.convert(msgspec.to_builtins(self), JobSpec)  # the bounds of its fields
        except msgspec.ValidationError as error:
            raise UsageError(f"this is not a valid job: {error}") from error
        if not NAMES.fullmatch(self.title):
            raise UsageError(
                f"a job's name is made of up to 64 letters, digits, dots, dashes and underscores; got {self.title!r}"
            )
        if not self.min <= self.largest <= self.virtual_workers:
            raise UsageError(
                f"1 <= min <= max <= virtual workers must hold, for every worker runs at least one of these; got min "
                f"{self.min}, max {self.largest}, {plural(self.virtual_workers, 'virtual worker')}"
            )
        if self.stragglers is Reaction.REMOVE:
            raise UsageError(
                "stragglers: remove is for `gyrostat run`; on a cluster the scheduler decides which devices a job has: report "
                "slow workers, or re-place their virtual workers"
            )
        for what, texts in (
            ("script", (self.script,)),
            ("argument", self.args),
            ("workdir", (self.workdir,)),
        ):
            if any("\0" in text for text in texts):
                raise UsageError(f"the {what} has a NUL character in it")
        path = PurePosixPath(self.workdir)
        if not path.is_absolute() or ".." in path.parts or os.path.normpath(self.workdir) != str(path):
            raise UsageError(
                f"the working directory is an absolute path without `..`, such as /home/me/train; got {self.workdir!r}"
            )
        for name, value in self.env.items():
            if not VARIABLES.fullmatch(name) or "\0" in value:
                raise UsageError(
                    f"an environment variable is NAME=VALUE with letters, digits and underscores in NAME; got {name!r}"
                )
            if name.startswith("GYROSTAT_"):
                raise UsageError(f"{name} is set by gyrostat itself; leave it out of the job's environment")
        if self.determinism is Determinism.HETEROGENEOUS and not self.types:
            raise UsageError(
                "a heterogeneous job computes with what all its device types have: name them, types: [avx512, avx2]"
            )
        return self


def read_spec(value: object) -> JobSpec:
    """A spec from parsed JSON or YAML; raises `UsageError` that names the field."""
    try:
        return msgspec.convert(value, JobSpec, strict=True).check()
    except msgspec.ValidationError as error:
        raise UsageError(f"this is not a valid job: {error}") from error


class JobState(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in _ENDS

    @property
    def waits(self) -> bool:
        """In the queue, with or without a checkpoint."""
        return self in (JobState.QUEUED, JobState.SUSPENDED)


_ENDS = frozenset({JobState.FINISHED, JobState.FAILED, JobState.CANCELLED})
_ANY_END = (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)
NEXT: Mapping[JobState, tuple[JobState, ...]] = {
    JobState.QUEUED: (JobState.STARTING, JobState.PAUSED, *_ANY_END),
    JobState.STARTING: (
        JobState.RUNNING,
        JobState.QUEUED,
        JobState.SUSPENDED,
        JobState.PAUSED,
        *_ANY_END,
    ),
    JobState.RUNNING: (
        JobState.STARTING,
        JobState.QUEUED,
        JobState.SUSPENDED,
        JobState.PAUSED,
        *_ANY_END,
    ),
    JobState.SUSPENDED: (JobState.STARTING, JobState.QUEUED, JobState.PAUSED, *_ANY_END),
    JobState.PAUSED: (JobState.QUEUED, JobState.SUSPENDED, *_ANY_END),
    JobState.FINISHED: (),
    JobState.FAILED: (),
    JobState.CANCELLED: (),
}
"""Which state may follow which."""


class Intent(StrEnum):
    """What the owner of a job has requested. Durable: it survives the daemon."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job, its state and its progress. Times are seconds since the epoch."""

    id: str
    number: int
    """Of its submission: 1, 2, 3 …"""
    name: str
    tenant: str
    vc: str
    spec: JobSpec
    state: JobState = JobState.QUEUED
    intent: Intent = Intent.RUN
    reason: str = ""
    """Why it is in this state."""
    beneath: tuple[tuple[str, ...], ...] = ()
    """Of each of these groups, one directory must be above its working directory and script, whenever a worker starts."""
    submitted: float = 0.0
    changed: float = 0.0
    """When its state last changed."""
    started: float | None = None
    """When it first got devices."""
    finished: float | None = None
    ran: float = 0.0
    """Seconds with devices, up to when its state last changed."""
    devices: tuple[int, ...] = ()
    """Those it holds: ids of `DeviceRecord`s."""
    borrowed: tuple[int, ...] = ()
    """Those of them that may be taken back at any time."""
    workers: int = 0
    step: int = 0
    loss: float | None = None
    throughput: float | None = None
    """Samples per second of the last few seconds."""
    attempts: int = 0
    """How often it was started: first start, after suspensions, after failures."""
    retries: int = 0
    """How often of these because it had failed."""
    worker_deaths: int = 0
    """How many of its workers have died; those that were evicted count, too."""
    incidents: int = 0
    """How many lines of its host's record of such incidents have become events."""
    not_before: float | None = None
    """A failed job is not tried again before."""
    failed_at: int | None = None
    """The step after which it last failed."""
    failure: str | None = None
    """The error with which it last failed."""
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    """Its last lines of output, once it has failed."""
    digest: str | None = None
    """Of all tracked state, once it has finished."""
    defect: str | None = None
    """Why the daemon cannot run it: the database has values of it that are not allowed (any more). It is stopped, and fails."""

    def moved(self, state: JobState, reason: str, now: float, **fields: Any) -> JobRecord:
        """The same job in another state."""
        if state is not self.state and state not in NEXT[self.state]:
            raise WrongState(f"job {self.id} is {self.state}; it cannot become {state}")
        ran = self.ran + (max(0.0, now - self.changed) if self.holds_devices else 0.0)
        return msgspec.structs.replace(self, state=state, reason=reason, changed=now, ran=ran, **fields)

    @property
    def holds_devices(self) -> bool:
        return self.state in (JobState.STARTING, JobState.RUNNING)

    def ran_by(self, now: float) -> float:
        """Seconds with devices so far."""
        return self.ran + (max(0.0, now - self.changed) if self.holds_devices else 0.0)


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One device, or CPU slot, and the job on it."""

    id: int
    name: str
    """Machine and position: `cpu-0/2`."""
    type: str
    node: str
    cell: str
    """Its cells, from the largest: `rack-0/node-1`."""
    pace: float | None = None
    """Samples per second of a paced slot, which sleeps instead of computing."""
    cpus: float | None = None
    memory: int | None = None
    job: str | None = None
    """The job whose worker is on it now."""
    tenant: str | None = None
    borrowed: bool = False
    reserved: bool = False
    """Taken by `reserve`, for a serving load."""


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A decision or an occurrence, with its reason."""

    number: int
    """1, 2, 3 …: `events(since=number)` goes on after it."""
    at: float
    """Seconds since the epoch."""
    kind: str
    """submitted, started, resized, preempted, finished, failed, cancelled, paused, resumed, retried, reserved, released,
    adopted, moved, not moved, blocked, evicted, worker died,
    recovered, workers restart, trouble …"""
    job: str | None
    tenant: str | None
    reason: str
    before: tuple[int, ...] = ()
    """Devices."""
    after: tuple[int, ...] = ()


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job does not run, and what would let it run."""

    job: str
    position: int
    """In its virtual cluster's queue; 1 is next."""
    why: str
    what_helps: str


class LogSource(StrEnum):
    OUTPUT = "output"
    """What its workers print, line by line: `[worker] line`."""
    HOST = "host"
    """Messages of the process that runs it."""
    METRICS = "metrics"
    """What its script passes to `job.log`: one JSON object per line, {"step": 3, "metrics": {"loss": 0.5}}."""
    CURVES = "curves"
    """Loss and throughput over time: one JSON object per line and second (`curves.Point`)."""


class LogChunk(msgspec.Struct, frozen=True):
    """Consecutive lines of a log."""

    lines: tuple[str, ...]
    next: str
    """The position after them."""
    complete: bool
    """The log has no more lines now."""

"""`JobSpec`: a job as its owner submits it; `job.yaml` has the same fields. Every value is bounded and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from gyrostat.core.determinism import parse_pool
from gyrostat.core.errors import UsageError
from gyrostat.core.job import CheckpointPolicy, Determinism, RecoveryMode, ReductionOrder, TrainingOptions
from gyrostat.core.plural import plural
from gyrostat.core.roles import MOST_CORES, MOST_SERVERS, ServerRecovery, ServerRole
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.diagnostics.poison import LIMIT as POISON_LIMIT
from gyrostat.job.diagnostics.stragglers import Reaction, StragglerPolicy
from gyrostat.job.diagnostics.watchdog import Action, WatchdogPolicy

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VARIABLES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

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
    servers: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_SERVERS,
            description="Number of parameter servers; 0: a synchronous job. With servers, `max` devices are by default `min`, "
            "and a step is an update by one batch.",
        ),
    ] = 0
    server_cores: Annotated[int, Meta(ge=1, le=MOST_CORES, description="Cores of each server.")] = 1
    server_memory: Annotated[Bytes | None, Meta(description="Bytes of memory that each server needs.")] = None
    server_recovery: Annotated[
        ServerRecovery, Meta(description="What happens when a parameter server is lost.")
    ] = ServerRecovery.EXACT
    server_adjust: Annotated[
        Wait, Meta(description="Seconds between two treatments of slow servers, at least; 0: none.")
    ] = 60.0
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
        if self.max is not None:
            return self.max
        return self.virtual_workers if not self.servers else self.min

    @property
    def server_role(self) -> ServerRole | None:
        """None: it has no parameter servers."""
        if not self.servers:
            return None
        return ServerRole(
            count=self.servers,
            cores=self.server_cores,
            memory=self.server_memory,
            recovery=self.server_recovery,
            adjust_s=self.server_adjust,
        )

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
        if self.servers:
            self._check_servers()
        elif self.server_cores != 1 or self.server_memory or self.server_recovery is not ServerRecovery.EXACT:
            raise UsageError(
                "server_cores, server_memory and server_recovery are for a job with servers: add servers: 2"
            )
        if not self.servers and not self.min <= self.largest <= self.virtual_workers:
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

    def _check_servers(self) -> None:
        """What a job with parameter servers cannot have."""
        assert self.server_role is not None  # checks itself
        if self.largest < self.min:
            raise UsageError(f"1 <= min <= max must hold; got min {self.min}, max {self.largest}")
        for name, default in (
            ("reduction", None),
            ("recovery", RecoveryMode.PEERS),
            ("stragglers", Reaction.REPORT),
        ):
            if getattr(self, name) != default:
                raise UsageError(
                    f"{name}: {getattr(self, name)} is for a synchronous job; leave it out of a job with servers"
                )


def read_spec(value: object) -> JobSpec:
    """A spec from parsed JSON or YAML; raises `UsageError` that names the field."""
    try:
        return msgspec.convert(value, JobSpec, strict=True).check()
    except msgspec.ValidationError as error:
        raise UsageError(f"this is not a valid job: {error}") from error

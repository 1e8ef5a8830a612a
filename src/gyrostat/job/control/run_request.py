"""`RunRequest`: a program and all options of its run, in groups, from which each worker's assignment is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gyrostat.core.checkpoint_names import newest_step
from gyrostat.core.errors import UsageError
from gyrostat.core.job import Assignment, ServerAccess, TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.core.roles import ServerRole
from gyrostat.core.secrets import without_secrets
from gyrostat.job import environment
from gyrostat.job.control.device_assignment import DeviceAssignment
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.instructions import Reconfiguration
from gyrostat.job.control.schedule import scheduled
from gyrostat.job.processes.protocol import Program, WorkerSpec

FIRST_GENERATION = 1
MOST_WORKERS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """What a run writes besides checkpoints."""

    log_dir: Path | None = None
    """The directory of the workers' output files."""
    trace: Path | None = None
    """The file of a time trace."""


@dataclass(frozen=True, kw_only=True)
class WorkerOverrides:
    """Workers that differ from one another, to emulate other devices: for tests and benchmarks."""

    paced: Sequence[float] = ()
    """Samples per second of worker 0, 1, 2 …, which wait instead of computing; the last one's is that of all others, too."""
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Set for single workers, such as `core.determinism.STARTED_AS` another type of CPU."""
    threads: Mapping[int, int] = field(default_factory=dict)
    """For workers that are started with another number of threads."""

    def __post_init__(self) -> None:
        if any(not 0 < rate < math.inf for rate in self.paced):
            raise UsageError(
                f"the pace of a device must be more than 0 samples per second, got {list(self.paced)}"
            )

    def pace(self, member: int) -> float | None:
        """Samples per second of a worker; None: it computes."""
        return self.paced[min(member, len(self.paced) - 1)] if self.paced else None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The parameter servers of a job, and the number of its workers, which is independent of its virtual workers."""

    role: ServerRole
    workers: int = 1
    record: Path | None = None
    """The file of the recorded order of updates (`gyrostat replay-async`)."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise UsageError(f"a server job begins with 1 to {MOST_WORKERS} workers, got {self.workers}")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A program, where it runs, how it trains, and what happens when it fails."""

    program: Program
    placement: Placement
    options: TrainingOptions = field(default_factory=TrainingOptions)
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    output: OutputFiles = field(default_factory=OutputFiles)
    overrides: WorkerOverrides = field(default_factory=WorkerOverrides)
    servers: ServerSettings | None = None
    """None: a synchronous job, without parameter servers."""
    schedule: Sequence[tuple[int, int]] = ()
    """(step, workers): the number of workers from that step's boundary on; in a server job, from that update on."""
    device_assignment: DeviceAssignment | None = None
    """Which worker runs on which device, if a scheduler assigns devices."""
    name: str | None = None
    """The name under which clients find the job; None: it takes no requests."""
    cwd: Path | None = None
    """The workers' directory; None: the current one."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set for the workers on top of this process's environment."""

    def again(self, virtual_workers: int, workers: int) -> RunRequest:
        """The next attempt after a failure: from the newest checkpoint or the start, on the same number of workers, or
        on as many as it has devices for."""
        if self.device_assignment is not None:
            workers = max(1, min(workers, self.device_assignment.size))
        same = (
            self
            if self.schedule or workers == self.placement.workers
            else replace(self, placement=Placement.even(virtual_workers, workers))
        )
        return same.resuming()

    def resumed(self, virtual_workers: int, workers: int, step: int) -> RunRequest:
        """The next attempt after a suspension: on `workers` workers, with the rest of the schedule after `step`."""
        rest = tuple(entry for entry in self.schedule if entry[0] > step)
        return replace(self, placement=Placement.even(virtual_workers, workers), schedule=rest).resuming()

    def resuming(self) -> RunRequest:
        """From the newest checkpoint, whatever the original request said; from the beginning if it writes none."""
        if self.options.checkpoint is None:
            return self
        checkpoint = replace(self.options.checkpoint, resume=True)
        return replace(self, options=replace(self.options, checkpoint=checkpoint))

    def newest_checkpoint(self) -> int | None:
        """The step that the next attempt resumes from; None: the job has no checkpoint, and begins again."""
        policy = self.options.checkpoint
        return None if policy is None else newest_step(Path(policy.directory))

    def actual_placement(self) -> Placement:
        """The placement that is run: for a reference run, one process per virtual worker."""
        return (
            Placement.from_counts([1] * self.placement.virtual_workers)
            if self.options.reference
            else self.placement
        )

    def check(self) -> None:
        """Raise `UsageError` for what cannot be run."""
        if self.overrides.paced and self.options.reference:
            raise UsageError("plain DDP, the reference, cannot be paced; leave out --paced")
        if not 1 <= self.failures.min_workers <= self.actual_placement().workers:
            raise UsageError(
                f"the minimum number of workers is 1 to {self.actual_placement().workers}, the number that the job begins "
                f"with; got {self.failures.min_workers}"
            )
        if not self.program.module and not (self._directory() / self.program.name).is_file():
            raise UsageError(f"there is no script {self.program.name!r}; for a module use -m")

    def changes(self) -> list[Reconfiguration]:
        """What the schedule asks for."""
        return scheduled(self.actual_placement().workers, self.schedule)

    def assignment(
        self, member: int, store: str, *, joins: bool = False, traces: Path | None = None
    ) -> Assignment:
        """The assignment of worker `member`.

        A worker that `joins` is alone until it receives its generation. Its part of the trace goes to `traces`.
        """
        placement = self.actual_placement()
        slot = None if self.device_assignment is None else self.device_assignment.slot(member)
        threads = self.overrides.threads.get(member, self.options.threads)
        if joins:
            placement = Placement.even(placement.virtual_workers, 1)
        return Assignment(
            placement=placement,
            options=replace(self.options, threads=threads),
            worker=0 if joins else member,
            member=member,
            joins=joins,
            holds=tuple(change.at_step for change in self.changes() if change.at_step is not None),
            generation=FIRST_GENERATION,
            store=store,
            trace=None if self.output.trace is None else str(traces),
            paced=self.overrides.pace(member) if slot is None else slot.paced,
        )

    def server_worker(self, member: int, access: ServerAccess) -> Assignment:
        """The assignment of a worker of a job with parameter servers: it is alone, and writes no checkpoints."""
        slot = None if self.device_assignment is None else self.device_assignment.slot(member)
        threads = self.overrides.threads.get(member, self.options.threads)
        return Assignment(
            placement=Placement.even(self.placement.virtual_workers, 1),
            options=replace(self.options, threads=threads, checkpoint=None),
            member=member,
            paced=self.overrides.pace(member) if slot is None else slot.paced,
            servers=access,
        )

    def spec(self, assignment: Assignment, local_rank: int | None = None) -> WorkerSpec:
        """The specification of a worker: its assignment, and this machine's directory and environment."""
        workers = str(assignment.placement.workers)
        local_rank = assignment.member if local_rank is None else local_rank
        slot = None if self.device_assignment is None else self.device_assignment.slot(assignment.member)
        env = {
            "PYTHONHASHSEED": "0",
            **without_secrets(environment.variables()),
            "RANK": str(assignment.member),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": workers,
            "LOCAL_WORLD_SIZE": workers,
            "OMP_NUM_THREADS": str(assignment.options.threads),
            **self.env,
            **({} if slot is None else slot.env),
            **self.overrides.env.get(assignment.member, {}),
        }
        return WorkerSpec(
            assignment=assignment,
            program=self.program,
            cwd=str(self._directory()),
            env=env,
            shows_stacks=self.failures.watchdog is not None,
        )

    def _directory(self) -> Path:
        return (self.cwd or Path()).absolute()

"""`RunRequest`: a program and all options of its run, from which each worker's assignment is made."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.core.job import (
    Assignment,
    CheckpointPolicy,
    Determinism,
    DevicePool,
    Probe,
    RecoveryMode,
    ReductionOrder,
)
from gyrostat.core.placement import Placement
from gyrostat.job.control.device_assignment import DeviceAssignment
from gyrostat.job.control.instructions import Reconfiguration
from gyrostat.job.control.schedule import scheduled
from gyrostat.job.diagnostics.poison import LIMIT
from gyrostat.job.diagnostics.stragglers import StragglerPolicy
from gyrostat.job.diagnostics.watchdog import WatchdogPolicy
from gyrostat.job.processes.protocol import Program, WorkerSpec

FIRST_GENERATION = 1


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A program, and all options of its run."""

    program: Program
    placement: Placement
    virtual_workers_given: bool = True
    """False: the script may choose the number."""
    threads: int = 1
    reduction: ReductionOrder | None = None
    determinism: Determinism = Determinism.ELASTIC
    pool: DevicePool | None = None
    """Device types of a `heterogeneous` job."""
    checkpoint: CheckpointPolicy | None = None
    reference: bool = False
    """As plain DDP: one process per virtual worker, whatever the placement says."""
    probe: Probe | None = None
    stop_after: int | None = None
    cwd: Path | None = None
    """The workers' directory; None: the current one."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set for the workers on top of this process's environment."""
    worker_env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Set for single workers on top of that, such as `core.determinism.STARTED_AS` another type of CPU."""
    worker_threads: Mapping[int, int] = field(default_factory=dict)
    """For workers that are started with another number of threads."""
    check_fingerprint: bool = True
    """False: workers whose bits differ are let in. For tests."""
    log_dir: Path | None = None
    """The directory of the workers' output files."""
    trace: Path | None = None
    """The file of a time trace."""
    timeout_s: float = 1800.0
    """Timeout of a collective, in seconds."""
    name: str | None = None
    """The name under which clients find the job; None: it takes no requests."""
    schedule: Sequence[tuple[int, int]] = ()
    """(step, workers): the number of workers from that step's boundary on."""

    device_assignment: DeviceAssignment | None = None
    """Which worker runs on which device, if a scheduler assigns devices."""
    paced: Sequence[float] = ()
    """Samples per second of worker 0, 1, 2 …, which wait instead of computing; the last one's is that of all others, too."""
    batch_size: int | None = None
    """Replaces the batch size of the script's loaders."""
    grace_s: float = 30.0
    """Seconds within which a worker that was sent SIGTERM must leave at a boundary."""
    stragglers: StragglerPolicy = field(default_factory=StragglerPolicy)
    """When a worker counts as slow, and the response."""
    recovery: RecoveryMode = RecoveryMode.PEERS
    """How the job recovers from a worker's death."""
    min_workers: int = 1
    """With fewer workers the job waits for others."""
    heartbeat_timeout_s: float = 60.0
    """Seconds after which a worker that does not answer counts as lost; 0: never."""
    restarts: int = 0
    """The maximum number of restarts from a checkpoint, after failures that are not the script's."""
    watchdog: WatchdogPolicy | None = None
    """When training counts as standing still, and the response."""
    poison_limit: int = LIMIT
    """The job ends when this number of workers have died while they ran the same micro-batch; 0: never."""

    @property
    def recovers(self) -> bool:
        """Survivors can train on without a worker that dies."""
        return self.recovery is not RecoveryMode.CHECKPOINT and not self.reference

    def again(self, virtual_workers: int, workers: int) -> RunRequest:
        """The next attempt after a failure: from the newest checkpoint, on the same number of workers."""
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
        """From the newest checkpoint, whatever the original request said."""
        assert self.checkpoint is not None
        return replace(self, checkpoint=replace(self.checkpoint, resume=True))

    def actual_placement(self) -> Placement:
        """The placement that is run: for a reference run, one process per virtual worker."""
        return (
            Placement.from_counts([1] * self.placement.virtual_workers) if self.reference else self.placement
        )

    def check(self) -> None:
        """Raise `UsageError` for what cannot be run."""
        if self.threads < 1:
            raise UsageError(f"a worker needs at least one thread, got {self.threads}")
        if (self.pool is not None) != (self.determinism is Determinism.HETEROGENEOUS):
            raise UsageError(
                "a pool of device types and the level `heterogeneous` need each other: "
                "--determinism heterogeneous --pool avx512,avx2"
            )
        if any(not 0 < rate < math.inf for rate in self.paced):
            raise UsageError(
                f"a paced device makes some samples per second, more than 0; got {list(self.paced)}"
            )
        if self.paced and self.reference:
            raise UsageError("plain DDP, the reference, computes; leave out --paced")
        if not 1 <= self.min_workers <= self.actual_placement().workers:
            raise UsageError(
                f"the minimum number of workers is 1 to {self.actual_placement().workers}, the number that the job begins "
                f"with; got {self.min_workers}"
            )
        if not 0 <= self.heartbeat_timeout_s < math.inf:
            raise UsageError(
                f"a silent worker is given up after some seconds, or never (0); got {self.heartbeat_timeout_s}"
            )
        if not 0 <= self.grace_s < math.inf:
            raise UsageError(
                f"the grace of a worker that is to leave is 0 seconds or more, got {self.grace_s}"
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
        pace = self.paced[min(member, len(self.paced) - 1)] if self.paced else None
        if joins:
            placement = Placement.even(placement.virtual_workers, 1)
        return Assignment(
            placement=placement,
            worker=0 if joins else member,
            member=member,
            joins=joins,
            holds=tuple(change.at_step for change in self.changes() if change.at_step is not None),
            generation=FIRST_GENERATION,
            store=store,
            virtual_workers_given=self.virtual_workers_given,
            reduction=self.reduction,
            determinism=self.determinism,
            threads=self.worker_threads.get(member, self.threads),
            pool=self.pool,
            check_fingerprint=self.check_fingerprint,
            checkpoint=self.checkpoint,
            reference=self.reference,
            stop_after=self.stop_after,
            probe=self.probe,
            trace=None if self.trace is None else str(traces),
            timeout_s=self.timeout_s,
            paced=pace if slot is None else slot.paced,
            batch_size=self.batch_size,
            recovery=self.recovery if self.recovers else RecoveryMode.CHECKPOINT,
        )

    def spec(self, assignment: Assignment, local_rank: int | None = None) -> WorkerSpec:
        """The specification of a worker: its assignment, and this machine's directory and environment."""
        workers = str(assignment.placement.workers)
        local_rank = assignment.member if local_rank is None else local_rank
        slot = None if self.device_assignment is None else self.device_assignment.slot(assignment.member)
        env = {
            "PYTHONHASHSEED": "0",
            **os.environ,
            "RANK": str(assignment.member),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": workers,
            "LOCAL_WORLD_SIZE": workers,
            "OMP_NUM_THREADS": str(assignment.threads),
            **self.env,
            **({} if slot is None else slot.env),
            **self.worker_env.get(assignment.member, {}),
        }
        return WorkerSpec(
            assignment=assignment,
            program=self.program,
            cwd=str(self._directory()),
            env=env,
            shows_stacks=self.watchdog is not None,
        )

    def _directory(self) -> Path:
        return (self.cwd or Path()).absolute()

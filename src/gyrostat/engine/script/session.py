"""The job of a process. One process has one job.

Under `gyrostat run` the worker's bootstrap calls `enter` with its assignment, then the script's own `gyrostat.init` finds it.
A plain `python train.py` has no assignment: it is a job of one worker.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.core.job import Assignment, CheckpointPolicy, ServerAccess, TrainingOptions
from gyrostat.core.phase import AgentPresence
from gyrostat.core.placement import Placement
from gyrostat.core.plural import plural
from gyrostat.data.rng import seed_all
from gyrostat.engine.numerics import determinism
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reconfigure.transition import Left
from gyrostat.engine.script.builder import BuiltJob, build_job
from gyrostat.engine.script.job import Job
from gyrostat.engine.script.training_loop import JobStopRequested
from gyrostat.engine.supervisor import NullSupervisor, Supervisor
from gyrostat.engine.training.heap import keep_freed_memory
from gyrostat.engine.training.reports import RequestBox, Requests
from gyrostat.engine.transport.peer_listener import allow_open_files

__all__ = [
    "JobStopRequested",
    "Left",
    "enter",
    "finish",
    "has_others",
    "init",
    "membership",
    "request_checkpoint",
    "request_stop",
    "server_access",
    "set_agent",
    "stop_requested",
]

logger = logging.getLogger(__name__)


class _Process:
    """What this process is: set once by `enter` and `init`."""

    assignment: Assignment | None = None
    supervisor: Supervisor = NullSupervisor()
    built: BuiltJob | None = None
    requests = RequestBox()
    """Requests of signals, also before the job is built."""


def enter(assignment: Assignment, supervisor: Supervisor) -> None:
    """Called by the worker's bootstrap before the script runs, and before the first operator does."""
    determinism.pin(assignment.options)
    keep_freed_memory()
    allow_open_files()
    _Process.assignment, _Process.supervisor, _Process.built = assignment, supervisor, None


def supervise(wrap: Callable[[Supervisor], Supervisor]) -> None:
    """Put an observer between the job that will be built and its supervisor."""
    _Process.supervisor = wrap(_Process.supervisor)


def surroundings() -> tuple[Assignment, Supervisor, RequestBox]:
    """Of this process's job: its assignment, who is reported to, and requests from outside."""
    assert _Process.built is not None
    return _Process.built.assignment, _Process.supervisor, _Process.requests


def assigned() -> bool:
    """Whether this process is a worker that gyrostat has started."""
    return _Process.assignment is not None


def current() -> Job | None:
    """This process's job, once the script has called `init`."""
    return None if _Process.built is None else _Process.built.job


def init(
    seed: int = 0,
    *,
    virtual_workers: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
) -> Job:
    """Join this process's job and seed torch, NumPy and `random` with `seed`, the same on all workers.

    `virtual_workers` fixes N in the script; if the command line says otherwise, that is an error. `checkpoint_dir` and
    `checkpoint_every` are for a plain `python train.py`; under `gyrostat run` its options say where checkpoints go.
    """
    if _Process.built is not None:
        raise Misuse("gyrostat.init was called twice; a process has one job")
    if not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a whole number of at least 0, got {seed!r}")
    alone = _Process.assignment is None
    assignment = _Process.assignment or _alone()
    assignment = _with_virtual_workers(assignment, virtual_workers)
    assignment = _with_checkpoints(assignment, checkpoint_dir, checkpoint_every)
    device = determinism.prepare(assignment.options)
    seed_all(seed)
    built = _Process.built = build_job(
        assignment,
        supervisor=_Process.supervisor,
        requests=_Process.requests,
        device=device,
        seed=seed,
        elastic=not alone,
    )
    logger.info(
        "%s joins a job of %s on %s",
        "a newcomer" if assignment.joins else f"worker {assignment.worker}",
        plural(assignment.placement.virtual_workers, "virtual worker"),
        plural(assignment.placement.workers, "worker"),
        extra={} if assignment.joins else {"generation": assignment.generation},
    )
    if alone:
        atexit.register(_finish_alone)
    return built.job


def finish(exit: SystemExit | None = None) -> None:
    """Called by the worker's bootstrap when the script has ended well, maybe by an `exit` of its own."""
    try:
        if _Process.built is not None:
            _Process.built.job.loops.finish(exit)
    finally:
        _Process.built, _Process.assignment = None, None


def membership() -> Membership | None:
    """Takes the coordinator's messages; None before the script has called `init`, and in jobs that cannot be resized."""
    return None if _Process.built is None else _Process.built.membership


def has_others() -> bool:
    """Whether the job goes on if this worker leaves it, as far as is known here. Safe in a signal handler."""
    built = _Process.built
    return built is not None and built.membership is not None and built.generation.has_others


def request_checkpoint() -> None:
    """A checkpoint is requested. Only records it: safe in a signal handler."""
    _Process.requests.put(Requests(checkpoint=True))


def request_stop() -> None:
    """Checkpoint at the next boundary and end, in all workers. Only records it: safe in a signal handler."""
    _Process.requests.put(Requests(stop=True))


def stop_requested() -> bool:
    """Whether this worker was asked to stop. In a job with parameter servers it leaves after the batch that it runs."""
    return _Process.requests.stop


def server_access() -> ServerAccess | None:
    """How this process reaches its job's parameter servers; None: the job has none, and keeps its tables in the process."""
    return None if _Process.assignment is None else _Process.assignment.servers


def set_agent(agent: AgentPresence) -> None:
    """Whether this worker has an agent. The job stops, with a checkpoint, if a worker is orphaned and no worker has an agent;
    if any worker has, it goes on without the orphaned ones when they are lost, unless it cannot recover from peers."""
    _Process.requests.set_agent(agent)


def _alone() -> Assignment:
    return Assignment(placement=Placement.even(1, 1), options=TrainingOptions(virtual_workers_given=False))


def _finish_alone() -> None:
    if getattr(sys, "last_value", None) is None:
        finish()


def _with_virtual_workers(assignment: Assignment, wanted: int | None) -> Assignment:
    given = assignment.placement.virtual_workers
    measured = assignment.options.batch_size is not None  # a measurement chooses N itself
    if wanted is None or wanted == given or measured:
        return assignment
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f"virtual_workers must be a whole number of at least 1, got {wanted!r}")
    if assignment.options.virtual_workers_given or assignment.options.reference:
        raise UsageError(
            f"the script says gyrostat.init(virtual_workers={wanted}), the command line --virtual-workers {given}; "
            "N is part of the job: remove one of the two or make them agree"
        )
    return replace(assignment, placement=Placement.even(wanted, assignment.placement.workers))


def _with_checkpoints(assignment: Assignment, directory: Any, every: int | None) -> Assignment:
    if every is not None and directory is None:
        raise UsageError(
            "gyrostat.init(checkpoint_every=…) needs checkpoint_dir: where should they be written?"
        )
    options = assignment.options
    if directory is None or options.checkpoint is not None or options.reference:
        return assignment
    if _Process.assignment is not None:
        raise UsageError(
            f"gyrostat.init(checkpoint_dir={os.fspath(directory)!r}) is for a plain `python` run; under gyrostat run say where "
            "checkpoints go on the command line: --checkpoint-dir DIR"
        )
    policy = CheckpointPolicy(directory=os.fspath(directory), every=every or 0)
    return replace(assignment, options=replace(options, checkpoint=policy))

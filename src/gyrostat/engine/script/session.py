"""How a process comes to its job. One process has one job.

Under `gyrostat run` the worker's bootstrap calls `enter` with what the launcher assigned, then the script's own
`gyrostat.init` finds it. A plain `python train.py` has no assignment: it is a job of one worker.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import is_nccl_available

from gyrostat.core.errors import Misuse, PeerLost, UsageError
from gyrostat.core.job import (
    Assignment,
    CheckpointPolicy,
    GradientBackend,
    NextGeneration,
    ReductionChoice,
    ReductionOrder,
)
from gyrostat.core.placement import Placement
from gyrostat.core.progress import Progress
from gyrostat.data.rng import seed_all
from gyrostat.engine.numerics import determinism
from gyrostat.engine.numerics.fingerprint import fingerprint
from gyrostat.engine.reconfigure.membership import Membership, PreparedGeneration
from gyrostat.engine.reconfigure.state_wire import StateWire
from gyrostat.engine.reconfigure.transition import Left
from gyrostat.engine.reduce.selftest import knows_gloo_order
from gyrostat.engine.script.job import Job, JobStopRequested
from gyrostat.engine.supervisor import NullSupervisor, Supervisor
from gyrostat.engine.trace import NoTracer, Tracer
from gyrostat.engine.training.heap import keep_freed_memory
from gyrostat.engine.training.paced import PacedDevice
from gyrostat.engine.training.reference import ReferenceRunner
from gyrostat.engine.training.runner import RequestBox, Requests, Runner
from gyrostat.engine.training.virtual import VirtualRunner
from gyrostat.engine.transport.backend import choose_carrier, choose_order
from gyrostat.engine.transport.group import GenerationFloor, WorkerGroup
from gyrostat.engine.transport.shared_memory import allow_open_files

__all__ = [
    "Left",
    "JobStopRequested",
    "enter",
    "finish",
    "has_others",
    "init",
    "membership",
    "request_checkpoint",
    "request_stop",
    "set_orphaned",
]


class _Process:
    """What this process is: set once by `enter` and `init`."""

    assignment: Assignment | None = None
    supervisor: Supervisor | None = None
    job: Job | None = None
    membership: Membership | None = None
    requests = RequestBox()
    """What signals asked for; the job's own once it has begun."""


def enter(assignment: Assignment, supervisor: Supervisor) -> None:
    """Called by the worker's bootstrap before the script runs, and before the first operator does."""
    determinism.pin(assignment)
    keep_freed_memory()
    allow_open_files()
    _Process.assignment, _Process.supervisor, _Process.job = assignment, supervisor, None


def supervise(wrap: Callable[[Supervisor], Supervisor]) -> None:
    """Put something between the job to come and its supervisor, to hear what is told to it."""
    _Process.supervisor = wrap(_Process.supervisor or NullSupervisor())


def current() -> Job | None:
    """This process's job, once the script has joined it."""
    return _Process.job


def init(
    seed: int = 0,
    *,
    virtual_workers: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
) -> Job:
    """Join this process's job and seed torch, NumPy and `random` with `seed`, on all workers alike.

    `virtual_workers` fixes N in the script; if the command line says otherwise, that is an error. `checkpoint_dir` and
    `checkpoint_every` are for a plain `python train.py`; under `gyrostat run` its options say where checkpoints go.
    """
    if _Process.job is not None:
        raise Misuse("gyrostat.init was called twice; a process has one job")
    if not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a whole number of at least 0, got {seed!r}")
    alone = _Process.assignment is None
    assignment = _Process.assignment or Assignment(
        placement=Placement.even(1, 1), virtual_workers_given=False
    )
    assignment = _with_virtual_workers(assignment, virtual_workers)
    assignment = _with_checkpoints(assignment, checkpoint_dir, checkpoint_every)
    device = determinism.prepare(assignment)
    seed_all(seed)
    order, reason = choose_order(
        assignment.reduction,
        device=device.type,
        nccl=is_nccl_available(),
        gloo_known=knows_gloo_order(assignment.placement.virtual_workers),
    )
    assignment = replace(assignment, reduction=order)
    tracer = _make_tracer(assignment)
    supervisor = _Process.supervisor or NullSupervisor()
    floor = GenerationFloor()
    group = _make_group(assignment, tracer, floor)
    connect_gradients = partial(_connect_gradients, order=order, reason=reason, device=device)
    choice = connect_gradients(group)
    runner = _make_runner(assignment, group, choice, seed)
    runner.supervisor = None if alone else supervisor
    membership = None
    if not alone and isinstance(runner, VirtualRunner):
        membership = _make_membership(
            assignment, supervisor, tracer, connect_gradients, floor, runner.warm_reductions
        )
        runner.acknowledge = membership.acknowledges
    job = Job(
        assignment=assignment,
        runner=runner,
        supervisor=supervisor,
        membership=membership,
        seed=seed,
        device=device,
        fingerprint=fingerprint(assignment, device),
        reduction=choice,
    )
    job.listen_to(_Process.requests)
    _Process.job, _Process.membership = job, membership
    if alone:
        atexit.register(_finish_alone)
    return job


def finish(exit: SystemExit | None = None) -> None:
    """Called by the worker's bootstrap when the script has ended well, maybe by an `exit` of its own."""
    try:
        if _Process.job is not None:
            _Process.job.finish(exit)
    finally:
        _Process.job, _Process.assignment, _Process.membership = None, None, None


def membership() -> Membership | None:
    """To be told of generations to come; None before the script has joined, and in jobs that cannot be resized."""
    return _Process.membership


def has_others() -> bool:
    """Whether the job goes on if this worker leaves it, as far as is known here. Safe in a signal handler."""
    job = _Process.job
    return _Process.membership is not None and job is not None and job.has_others


def request_checkpoint() -> None:
    """A checkpoint is wanted. Only notes it: safe in a signal handler."""
    _Process.requests.put(Requests(checkpoint=True))


def request_stop() -> None:
    """Checkpoint at the next boundary and end, in all workers. Only notes it: safe in a signal handler."""
    _Process.requests.put(Requests(stop=True))


def set_orphaned(orphaned: bool) -> None:
    """Whether this worker's agent has been away for too long. The job stops, with a checkpoint, while no worker has an agent;
    if any worker has, it goes on without the orphaned ones when they are lost, unless it cannot recover from peers."""
    _Process.requests.orphaned = orphaned


def _finish_alone() -> None:
    if getattr(sys, "last_value", None) is None:
        finish()


def _with_virtual_workers(assignment: Assignment, wanted: int | None) -> Assignment:
    given = assignment.placement.virtual_workers
    measured = assignment.batch_size is not None  # whoever measures decides what is measured
    if wanted is None or wanted == given or measured:
        return assignment
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f"virtual_workers must be a whole number of at least 1, got {wanted!r}")
    if assignment.virtual_workers_given or assignment.reference:
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
    if directory is None or assignment.checkpoint is not None or assignment.reference:
        return assignment
    if _Process.assignment is not None:
        raise UsageError(
            f"gyrostat.init(checkpoint_dir={os.fspath(directory)!r}) is for a plain `python` run; under gyrostat run say where "
            "checkpoints go on the command line: --checkpoint-dir DIR"
        )
    return replace(assignment, checkpoint=CheckpointPolicy(directory=os.fspath(directory), every=every or 0))


def _make_tracer(assignment: Assignment) -> NoTracer:
    if assignment.trace is None:
        return NoTracer()
    return Tracer(Path(assignment.trace) / f"worker-{assignment.worker}.json", assignment.worker)


def _make_membership(
    assignment: Assignment,
    supervisor: Supervisor,
    tracer: NoTracer,
    connect_gradients: Callable[[WorkerGroup], object],
    floor: GenerationFloor,
    warm: Callable[[Placement, WorkerGroup], None],
) -> Membership:
    member, timeout_s = assignment.member, assignment.timeout_s

    def connect(plan: NextGeneration) -> PreparedGeneration:
        """Blocks until all are there: called in a thread of its own."""
        wire = (
            StateWire(plan, member, timeout_s, assignment.host) if StateWire.concerns(plan, member) else None
        )
        worker = plan.worker_of(member)
        if worker is None:
            return PreparedGeneration(plan, None, wire)
        group = WorkerGroup(
            rank=worker,
            size=plan.placement.workers,
            generation=plan.generation,
            store=plan.store,
            timeout_s=timeout_s,
            host=assignment.host,
            tracer=tracer,
            floor=floor,
        )
        try:
            connect_gradients(group)
        except PeerLost:
            group.close()
            raise
        if not plan.is_rescue and member not in plan.newcomers:
            warm(plan.placement, group)
        return PreparedGeneration(plan, group, wire)

    return Membership(
        member,
        tuple(range(assignment.placement.workers)),
        connect=connect,
        tell_prepared=supervisor.prepared,
        tell_lost=supervisor.lost,
        floor=floor,
    )


def _make_group(assignment: Assignment, tracer: NoTracer, floor: GenerationFloor) -> WorkerGroup:
    return WorkerGroup(
        rank=assignment.worker,
        size=assignment.placement.workers,
        generation=assignment.generation,
        store=assignment.store,
        timeout_s=assignment.timeout_s,
        host=assignment.host,
        tracer=tracer,
        floor=floor,
    )


def _connect_gradients(
    group: WorkerGroup, order: ReductionOrder, reason: str, device: torch.device
) -> ReductionChoice:
    """Workers tell each other which GPUs they have, so that all choose alike what gradients travel over."""
    mine = determinism.gpu(device)
    gpus = [gpu.decode() for gpu in group.exchange("gpus", Progress(), mine.encode())]
    carrier, because = choose_carrier(order, gpus, nccl=is_nccl_available())
    if carrier is GradientBackend.NCCL:
        group.use_nccl(device)
    elif group.shared_memory is not None and device.type == "cpu":
        because += "; all workers are on one machine and see one another's gradients"
    return ReductionChoice(order=order, carrier=carrier, reason=f"{reason}; {because}")


def _make_runner(assignment: Assignment, group: WorkerGroup, choice: ReductionChoice, seed: int) -> Runner:
    if assignment.reference:
        return ReferenceRunner(
            placement=assignment.placement,
            group=group,
            seed=seed,
            store=assignment.store,
            timeout_s=assignment.timeout_s,
            reduction=choice,
        )
    paced = None if assignment.paced is None else PacedDevice(assignment.paced)
    return VirtualRunner(
        placement=assignment.placement, group=group, seed=seed, order=choice.order, paced=paced
    )

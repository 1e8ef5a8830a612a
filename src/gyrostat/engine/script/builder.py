"""Builds a job from its assignment: all parts of the engine are wired here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import is_nccl_available

from gyrostat.core.errors import PeerLost
from gyrostat.core.job import (
    Assignment,
    GradientBackend,
    NextGeneration,
    RecoveryMode,
    ReductionChoice,
    ReductionOrder,
)
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint.capture import take_shared
from gyrostat.engine.checkpoint.manager import CheckpointManager, NoCheckpoints
from gyrostat.engine.numerics import determinism
from gyrostat.engine.numerics.fingerprint import fingerprint
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reconfigure.phases import PreparedGeneration
from gyrostat.engine.reconfigure.recovery import Recovery
from gyrostat.engine.reconfigure.state_wire import StateWire
from gyrostat.engine.reconfigure.transition import NoTransition, Transition
from gyrostat.engine.reduce.selftest import knows_gloo_order
from gyrostat.engine.script.job import Job
from gyrostat.engine.script.loaders import Loaders
from gyrostat.engine.script.loops import Loops
from gyrostat.engine.script.step import LoopData
from gyrostat.engine.script.step_reporter import StepReporter
from gyrostat.engine.script.tracked import Tracked
from gyrostat.engine.script.training_loop import TrainingLoop, TrainingParts
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.trace import NoTracer, Tracer
from gyrostat.engine.training import reference
from gyrostat.engine.training.backups import ContextBackups
from gyrostat.engine.training.collectives import CollectiveLog, Collectives, NoRecovery, PeerRecovery
from gyrostat.engine.training.evaluation import Evaluator
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.loop_length import LoopLength
from gyrostat.engine.training.mini_batch import MiniBatchParts, MiniBatchRunner
from gyrostat.engine.training.paced import PacedDevice
from gyrostat.engine.training.parts import RealDevice
from gyrostat.engine.training.relocation import NoRelocation
from gyrostat.engine.training.replicas import compare_replicas
from gyrostat.engine.training.reports import RequestBox, acknowledge_nothing
from gyrostat.engine.training.virtual_workers import VirtualWorkers, make_virtual_workers
from gyrostat.engine.transport.backend import choose_backend, choose_order
from gyrostat.engine.transport.group import WorkerGroup
from gyrostat.engine.transport.pending import GenerationFloor


@dataclass(frozen=True, kw_only=True)
class BuiltJob:
    """A job as a process holds it."""

    job: Job
    """What the script gets."""
    assignment: Assignment
    generation: CurrentGeneration
    membership: Membership | None
    """None in jobs that cannot be resized."""


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What both kinds of job are built from."""

    assignment: Assignment
    generation: CurrentGeneration
    reduction: ReductionChoice
    connect_gradients: Callable[[WorkerGroup], ReductionChoice]
    floor: GenerationFloor
    supervisor: Supervisor
    requests: RequestBox
    device: torch.device
    seed: int
    loops: Loops
    tracked: Tracked
    loaders: Loaders
    reports: StepReporter


def build_job(
    assignment: Assignment,
    *,
    supervisor: Supervisor,
    requests: RequestBox,
    device: torch.device,
    seed: int,
    elastic: bool,
) -> BuiltJob:
    """Connects to the other workers. `elastic`: a coordinator may change the job's workers."""
    order, reason = choose_order(
        assignment.options.reduction,
        device=device.type,
        nccl=is_nccl_available(),
        gloo_known=knows_gloo_order(assignment.placement.virtual_workers),
    )
    assignment = replace(assignment, options=replace(assignment.options, reduction=order))
    floor = GenerationFloor()
    group = _make_group(assignment, floor)

    def connect_gradients(group: WorkerGroup) -> ReductionChoice:
        return _connect_gradients(group, order=order, reason=reason, device=device)

    generation = CurrentGeneration(assignment.placement, group, joining=assignment.joins)
    tracked = Tracked()
    common = _Common(
        assignment=assignment,
        generation=generation,
        reduction=connect_gradients(group),
        connect_gradients=connect_gradients,
        floor=floor,
        supervisor=supervisor,
        requests=requests,
        device=device,
        seed=seed,
        loops=Loops(),
        tracked=tracked,
        loaders=Loaders(generation, seed=seed, measured_batch_size=assignment.options.batch_size),
        reports=StepReporter(generation, tracked, supervisor, assignment.options.probe),
    )
    return (
        _build_reference(common) if assignment.options.reference else _build_virtual(common, elastic=elastic)
    )


def _build_virtual(common: _Common, *, elastic: bool) -> BuiltJob:
    """N virtual workers on any number of workers."""
    assignment, options, supervisor = common.assignment, common.assignment.options, common.supervisor
    recovers = elastic and options.recovers
    workers = make_virtual_workers(
        common.generation,
        seed=common.seed,
        order=common.reduction.order,
        backups=ContextBackups() if recovers else None,
        approximate=options.recovery is RecoveryMode.APPROXIMATE,
    )
    membership = _make_membership(common, workers) if elastic else None
    recovery: PeerRecovery = NoRecovery()
    if membership is not None and recovers:
        recovery = Recovery(workers, membership, supervisor, step=lambda: common.loops.progress.step)
        recovery.subscribe(common.reports.recovered)
    collectives = Collectives(common.generation, workers.log, recovery)
    length = LoopLength(common.generation, collectives)
    checkpoints = CheckpointManager(
        options.checkpoint,
        workers,
        collectives,
        fingerprint=fingerprint(assignment, common.device),
        seed=common.seed,
        supervisor=supervisor,
        requests=common.requests,
    )
    transition = NoTransition()
    if membership is not None:
        transition = _make_transition(common, membership, workers, collectives, recovery, checkpoints, length)
    runner = MiniBatchRunner(
        MiniBatchParts(
            generation=common.generation,
            contexts=workers.contexts,
            batches=workers.batches,
            gradients=workers.gradients,
            buffers=workers.buffers,
            relocation=workers.relocation,
            recovery=recovery,
            log=workers.log,
            device=RealDevice() if assignment.paced is None else PacedDevice(assignment.paced),
        ),
        supervisor=supervisor,
        requests=common.requests,
        acknowledge=acknowledge_nothing if membership is None else membership.acknowledge,
    )

    def compare(progress: Progress) -> None:
        if common.generation.group.size > 1:
            shared = take_shared(common.tracked.objects, common.tracked.state, workers)
            compare_replicas(shared, collectives, progress)

    return _build_loop(
        common,
        runner,
        LoopData(runner=runner, batches=workers.batches, length=length, collectives=collectives),
        Evaluator(common.generation, collectives, workers.contexts.streams, seed=common.seed),
        checkpoints,
        transition,
        compare,
        membership,
    )


def _make_transition(
    common: _Common,
    membership: Membership,
    workers: VirtualWorkers,
    collectives: Collectives,
    recovery: PeerRecovery,
    checkpoints: CheckpointManager,
    length: LoopLength,
) -> Transition:
    transition = Transition(
        membership,
        workers,
        collectives,
        recovery,
        checkpoints,
        common.supervisor,
        length=length,
        loaders=common.loaders.by_number,
        holds=common.assignment.holds,
        seed=common.seed,
    )
    if isinstance(recovery, Recovery):
        recovery.subscribe(transition.recovered)
    return transition


def _build_reference(common: _Common) -> BuiltJob:
    """Plain DDP, one virtual worker per process."""
    assignment, generation = common.assignment, common.generation
    contexts = reference.DdpContexts(generation, seed=common.seed)
    log = CollectiveLog()
    collectives = Collectives(generation, log, NoRecovery())
    runner = MiniBatchRunner(
        MiniBatchParts(
            generation=generation,
            contexts=contexts,
            batches=reference.DdpBatches(generation, contexts),
            gradients=reference.DdpGradients(
                generation,
                store=assignment.store,
                timeout_s=assignment.options.timeout_s,
                reduction=common.reduction,
                in_micro_batch=lambda: runner.in_backward_pass,
            ),
            buffers=reference.DdpBuffers(),
            relocation=NoRelocation(),
            recovery=NoRecovery(),
            log=log,
            device=RealDevice(),
        ),
        supervisor=common.supervisor,
        requests=common.requests,
        acknowledge=acknowledge_nothing,
    )
    length = LoopLength(generation, collectives)
    evaluator = Evaluator(
        generation,
        collectives,
        contexts.streams,
        seed=common.seed,
        share_buffers=reference.broadcast_buffers,
    )
    return _build_loop(
        common,
        runner,
        LoopData(runner=runner, batches=runner.parts.batches, length=length, collectives=collectives),
        evaluator,
        NoCheckpoints(),
        NoTransition(),
        lambda progress: None,
        None,
    )


def _build_loop(
    common: _Common,
    runner: MiniBatchRunner,
    data: LoopData,
    evaluator: Evaluator,
    checkpoints: NoCheckpoints,
    transition: NoTransition,
    compare: Callable[[Progress], None],
    membership: Membership | None,
) -> BuiltJob:
    training = TrainingLoop(
        TrainingParts(
            options=common.assignment.options,
            reduction=common.reduction,
            seed=common.seed,
            generation=common.generation,
            data=data,
            reduced=lambda: runner.parts.gradients.reduced,
            evaluator=evaluator,
            loops=common.loops,
            loaders=common.loaders,
            tracked=common.tracked,
            reports=common.reports,
            checkpoints=checkpoints,
            transition=transition,
            compare_replicas=compare,
            supervisor=common.supervisor,
        )
    )
    job = Job(
        training,
        generation=common.generation,
        loaders=common.loaders,
        device=common.device,
        seed=common.seed,
    )
    return BuiltJob(
        job=job, assignment=common.assignment, generation=common.generation, membership=membership
    )


def _make_membership(common: _Common, workers: VirtualWorkers) -> Membership:
    assignment, supervisor = common.assignment, common.supervisor
    member, timeout_s = assignment.member, assignment.options.timeout_s
    tracer = common.generation.group.tracer

    def connect(plan: NextGeneration) -> PreparedGeneration:
        """Blocks until all members are connected: called in a thread of its own."""
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
            floor=common.floor,
        )
        try:
            common.connect_gradients(group)
        except PeerLost:
            group.close()
            raise
        if not plan.is_recovery and member not in plan.newcomers:
            workers.relocation.reducers.prepare(plan.placement, group)
        return PreparedGeneration(plan, group, wire)

    return Membership(
        member,
        tuple(range(assignment.placement.workers)),
        connect=connect,
        report_prepared=supervisor.prepared,
        report_lost=supervisor.lost,
        floor=common.floor,
    )


def _make_group(assignment: Assignment, floor: GenerationFloor) -> WorkerGroup:
    tracer = NoTracer()
    if assignment.trace is not None:
        tracer = Tracer(Path(assignment.trace) / f"worker-{assignment.worker}.json", assignment.worker)
    return WorkerGroup(
        rank=assignment.worker,
        size=assignment.placement.workers,
        generation=assignment.generation,
        store=assignment.store,
        timeout_s=assignment.options.timeout_s,
        host=assignment.host,
        tracer=tracer,
        floor=floor,
    )


def _connect_gradients(
    group: WorkerGroup, *, order: ReductionOrder, reason: str, device: torch.device
) -> ReductionChoice:
    """Workers exchange which GPUs they have, so that all choose the same backend for gradients."""
    mine = determinism.gpu(device)
    gpus = [gpu.decode() for gpu in group.exchange("gpus", Progress(), mine.encode())]
    carrier, because = choose_backend(order, gpus, nccl=is_nccl_available())
    if carrier is GradientBackend.NCCL:
        group.use_nccl(device)
    elif group.shared_memory is not None and device.type == "cpu":
        because += "; all workers are on one machine and see one another's gradients"
    return ReductionChoice(order=order, carrier=carrier, reason=f"{reason}; {because}")

"""The virtual workers of this worker, and everything that they own or share: the engine's parts, put together."""

from __future__ import annotations

from dataclasses import dataclass

from gyrostat.core.job import ReductionOrder
from gyrostat.engine.training.backups import ContextBackups, NoBackups
from gyrostat.engine.training.batch_sources import BatchSources
from gyrostat.engine.training.buffer_sync import BufferSync
from gyrostat.engine.training.collectives import CollectiveLog
from gyrostat.engine.training.context_switch import ContextSwitch
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.gradient_sync import GradientSync
from gyrostat.engine.training.relocation import Relocation


@dataclass(frozen=True, kw_only=True)
class VirtualWorkers:
    """One object per worker, for its whole life. The parts share the generation in force."""

    generation: CurrentGeneration
    contexts: ContextSwitch
    batches: BatchSources
    gradients: GradientSync
    buffers: BufferSync
    backups: ContextBackups
    relocation: Relocation
    log: CollectiveLog


def make_virtual_workers(
    generation: CurrentGeneration,
    *,
    seed: int,
    order: ReductionOrder = ReductionOrder.DDP,
    backups: ContextBackups | None = None,
    approximate: bool = False,
) -> VirtualWorkers:
    """`backups`: for jobs that recover from peers. `approximate`: as for `Relocation`."""
    backups = backups or NoBackups()
    buffers = BufferSync(generation)
    contexts = ContextSwitch(generation, buffers, backups, seed=seed)
    batches = BatchSources(generation, contexts, backups)
    gradients = GradientSync(generation, order)
    return VirtualWorkers(
        generation=generation,
        contexts=contexts,
        batches=batches,
        gradients=gradients,
        buffers=buffers,
        backups=backups,
        relocation=Relocation(generation, contexts, batches, gradients, backups, approximate=approximate),
        log=CollectiveLog(),
    )

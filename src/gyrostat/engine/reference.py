"""The reference: the same script as plain DDP, on N processes, with torch's own classes and nothing of the engine's.

DistributedDataParallel wraps each tracked module and its calls are routed through the wrapper; DataLoader and
DistributedSampler bring the data; gradients are whatever DDP makes of them. Only the script-facing loop is shared with the
engine, and the rule that code outside the inner loop draws from a shared stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from gyrostat.core.errors import UsageError
from gyrostat.core.job import Reduction
from gyrostat.core.placement import Placement
from gyrostat.data.order import Order
from gyrostat.data.rng import RngState, seed_all
from gyrostat.engine.group import Group
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.reduce.hook import tree_hook
from gyrostat.engine.runner import MicroBatch, Runner, StepPlan
from gyrostat.engine.torch_internals import file_store, hash_store


class ReferenceRunner(Runner):
    """One DDP rank."""

    def __init__(
        self,
        *,
        placement: Placement,
        group: Group,
        seed: int,
        store: str | None,
        timeout_s: float,
        order: Reduction,
    ) -> None:
        super().__init__(placement=placement, group=group, seed=seed)
        self._order = order
        dist.init_process_group(
            "gloo",
            store=hash_store() if store is None else file_store(store, group.size, "reference"),
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._wrappers: list[DistributedDataParallel] = []
        self._streams_of_rank: RngState
        self._streams_outside: RngState
        self._batches: Iterator[Any] = iter(())
        self._step_batches: list[Any] = []
        self._local: dict[str, Any] = {}

    def add_module(self, name: str, module: nn.Module, options: DdpOptions) -> None:
        self._modules[name] = module
        if any(parameter.requires_grad for parameter in module.parameters()):
            wrapper = route_through_ddp(module, options, lambda: self.micro_batch is not None)
            if self._order is Reduction.TREE:
                wrapper.register_comm_hook(None, tree_hook)
            self._wrappers.append(wrapper)

    def start_streams(self) -> None:
        shared = self.streams.save()
        seed_all(self.seed + self.group.rank)
        self._streams_of_rank = self.streams.save()
        self.streams.exchange(shared)

    def begin_pass(self) -> None:
        pass

    def enter(self, rank: int, weight: float | None) -> None:
        self._streams_outside = self.streams.exchange(self._streams_of_rank)

    def fetch(self, plan: StepPlan, rank: int, number: int, pass_: int) -> Any:
        if pass_ > 0:
            return self._step_batches[number]
        if number == 0:
            self._step_batches = []
            if plan.begins_epoch:
                self._batches = iter(_dataloader(plan, rank))
        self._step_batches.append(next(self._batches))
        return self._step_batches[-1]

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = micro_batch.last  # what `no_sync` sets

    def leave(self, rank: int) -> None:
        self._streams_of_rank = self.streams.exchange(self._streams_outside)

    def end_pass(self) -> bytes:
        return b""

    def settle(self, extras: Sequence[bytes]) -> None:
        pass

    def share_buffers_for_evaluation(self) -> None:
        # As DDP's wrapper does before a forward; here other ranks still hold their own.
        for module in self._modules.values():
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def local(self, rank: int) -> dict[str, Any]:
        return self._local


def route_through_ddp(
    module: nn.Module, options: DdpOptions, active: Callable[[], bool]
) -> DistributedDataParallel:
    """Wrap `module` in DDP, and make `module(…)` mean `wrapper(…)` from now on, whenever `active`.

    The script keeps calling its own module, but training through the raw module while DDP wraps it does not
    synchronise gradients. The module's class is replaced by a subclass whose call goes to the wrapper first.
    """
    wrapper = DistributedDataParallel(module, **_ddp_arguments(options))
    inside = False

    class Routed(type(module)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside or not active():
                return super().__call__(*args, **kwargs)
            inside = True
            try:
                return wrapper(*args, **kwargs)
            finally:
                inside = False

    Routed.__name__, Routed.__qualname__ = type(module).__name__, type(module).__qualname__
    object.__setattr__(module, "__class__", Routed)
    return wrapper


def _ddp_arguments(options: DdpOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "find_unused_parameters": options.find_unused_parameters,
        "static_graph": options.static_graph,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
        "bucket_cap_mb": options.bucket_cap_mb,
    }
    new_name = "forward_sync_buffers"
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    arguments[new_name if new_name in known else "broadcast_buffers"] = options.broadcast_buffers
    return arguments


def _dataloader(plan: StepPlan, rank: int) -> DataLoader[Any]:
    order, loader = plan.order, plan.loader
    if not isinstance(order, Order):
        raise UsageError(
            "plain DDP has neither shards nor batch sizes per rank: a loader with them cannot be compared with it"
        )
    if order.shuffle == "bijection":
        batches = (order.indices(rank, batch) for batch in range(order.batches))
        return DataLoader(loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn)
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=order.virtual_workers,
        rank=rank,
        shuffle=order.shuffle,
        seed=order.seed,
        drop_last=not order.pad,
    )
    sampler.set_epoch(order.epoch)
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
    )

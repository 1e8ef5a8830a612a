"""The reference: the same script as plain DDP, on N processes, with torch's own classes instead of the engine's.

DistributedDataParallel wraps each tracked module and its calls are routed through the wrapper; DataLoader and
DistributedSampler bring the data; gradients are DDP's. The parts below take the place of the engine's in a mini-batch
(`parts.py`). Only the script-facing loop is shared with the engine, and the rule that code outside the inner loop draws from a
shared stream.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from gyrostat.core.errors import UsageError
from gyrostat.core.job import GradientBackend, ReductionChoice, ReductionOrder
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.order import EpochOrder, EvenOrder, UnevenOrder
from gyrostat.data.rng import RngState, Streams, seed_all
from gyrostat.data.virtual_data_worker import init_of_rank
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.reduce.hook import tree_hook
from gyrostat.engine.torch_internals import hash_store, rendezvous
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.plan import DataLoop, StepPlan


class DdpContexts:
    """The random streams of one DDP rank. Buffers are DDP's."""

    def __init__(self, generation: CurrentGeneration, *, seed: int) -> None:
        self._rank, self._seed = generation.group.rank, seed
        self.streams = Streams()
        self._own: RngState
        self._outer: RngState
        self._local: dict[str, Any] = {}

    def start(self, *, same: bool = False) -> None:
        outer = self.streams.save()
        if not same:
            seed_all(self._seed + self._rank)
        self._own = self.streams.save()
        self.streams.exchange(outer)

    def begin_pass(self) -> None:
        pass

    def switch_in(self, rank: int, *, survey: bool = False) -> None:
        self._outer = self.streams.exchange(self._own)

    def begin_micro_batch(self, *, last: bool) -> None:
        pass

    def switch_out(self, rank: int, *, survey: bool = False) -> None:
        self._own = self.streams.exchange(self._outer)

    def end_pass(self) -> None:
        pass

    def random_states(self) -> dict[int, RngState]:
        return {self._rank: self._own}

    def local(self, rank: int) -> dict[str, Any]:
        return self._local

    def in_own_streams(self, do: Callable[[], None]) -> None:
        """`do()`, outside a pass, with the streams of this rank in force."""
        outside = self.streams.exchange(self._own)
        do()
        self._own = self.streams.exchange(outside)


class DdpBatches:
    """The micro-batches of one DDP rank, from torch's DataLoader."""

    def __init__(self, generation: CurrentGeneration, contexts: DdpContexts) -> None:
        self._rank, self._contexts = generation.group.rank, contexts
        self._loaders: dict[int, DataLoader[Any]] = {}
        self._loop: DataLoop | None = None
        self._batches: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._step_batches: list[Any] = []

    def begin_loop(self, loop: DataLoop) -> None:
        self._loop, self._batches = loop, None

    def available(self, count: int, done: int) -> int:
        missing = count - len(self._peeked)
        self._contexts.in_own_streams(
            lambda: self._peeked.extend(itertools.islice(self._iterator(), missing))
        )
        return len(self._peeked)

    def forget_available(self) -> None:
        pass

    def begin_pass(self, plan: StepPlan, pass_: int) -> None:
        pass

    def fetch(self, plan: StepPlan, rank: int, number: int, pass_: int) -> Any:
        if pass_ > 0:
            return self._step_batches[number]
        if number == 0:
            self._step_batches = []
        batches = self._iterator()
        self._step_batches.append(self._peeked.pop(0) if self._peeked else next(batches))
        return self._step_batches[-1]

    def in_every_stream(self, do: Callable[[], Any]) -> None:
        self._contexts.in_own_streams(do)

    @property
    def samples(self) -> int:
        """As many as a full step has: torch's DataLoader does not count them."""
        assert self._loop is not None
        return self._loop.loader.batch_size or 1

    def end_loop(self, *, used_up: bool) -> None:
        batches = self._batches
        if used_up and batches is not None:
            self._contexts.in_own_streams(lambda: next(batches, None))  # as a `for` loop does at its end
        self._batches, self._peeked, self._step_batches = None, [], []

    def _iterator(self) -> Iterator[Any]:
        """The DataLoader's iterator in this loop, made when it is first needed, in the rank's streams."""
        if self._batches is None:
            assert self._loop is not None
            loader = self._loop.loader
            if loader.number not in self._loaders:
                self._loaders[loader.number] = _dataloader(loader, self._loop.order, self._rank)
            dataloader = self._loaders[loader.number]
            _set_epoch(dataloader, self._loop.order, self._loop.epoch)
            self._batches = _one_ahead(iter(dataloader)) if loader.lookahead else iter(dataloader)
        return self._batches


class DdpGradients:
    """Gradients by DistributedDataParallel."""

    reduced = None

    def __init__(
        self,
        generation: CurrentGeneration,
        *,
        store: str | None,
        timeout_s: float,
        reduction: ReductionChoice,
        in_micro_batch: Callable[[], bool],
    ) -> None:
        """`in_micro_batch`: calls of tracked modules go through DDP only while it returns True."""
        self._order, self._in_micro_batch = reduction.order, in_micro_batch
        group, timeout = generation.group, timedelta(seconds=timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if reduction.carrier is GradientBackend.NCCL else "gloo",
            store=hash_store() if store is None else rendezvous(store, group.size, "reference", timeout),
            rank=group.rank,
            world_size=group.size,
            timeout=timeout,
        )
        self._wrappers: list[DistributedDataParallel] = []

    def add(self, name: str, module: nn.Module, options: DdpOptions) -> bool:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return False
        wrapper = route_through_ddp(module, options, self._in_micro_batch)
        if self._order is ReductionOrder.TREE:
            wrapper.register_comm_hook(None, tree_hook)
        self._wrappers.append(wrapper)
        return True

    def begin_pass(self) -> None:
        pass

    def begin_rank(self, rank: int, weight: float | None, *, last_here: bool) -> None:
        pass

    def begin_micro_batch(self, *, last: bool) -> None:
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = last  # what `no_sync` sets

    def before_backward(self, *, first: bool) -> None:
        pass

    def after_backward(self, *, last: bool) -> None:
        pass

    def participation(self) -> bytes:
        return b""

    def send_off(self) -> None:
        pass

    def complete(self, participations: Sequence[bytes]) -> None:
        pass

    def settle(self, participations: Sequence[bytes]) -> None:
        pass

    def compensate(self, left_out: int) -> None:
        pass


class DdpBuffers:
    """DDP broadcasts buffers itself, before a forward."""

    def add(self, name: str, module: nn.Module, *, trained: bool, broadcast: bool) -> None:
        pass

    def send_off(self) -> None:
        pass

    def complete(self) -> None:
        pass

    def settle(self) -> None:
        pass


def broadcast_buffers(modules: Mapping[str, nn.Module]) -> None:
    """For an evaluation: as DDP's wrapper does before a forward; the other ranks still hold their own."""
    for module in modules.values():
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


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


def _dataloader(loader: OrderedLoader, order: EpochOrder | None, rank: int) -> DataLoader[Any]:
    """What a DDP script would make on this rank."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": init_of_rank(loader.worker_init_fn, rank),
        "multiprocessing_context": loader.context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    dataset = loader.dataset_of(rank)
    if loader.batch_sampler is not None:
        return DataLoader(dataset, batch_sampler=loader.sampler_of(rank), **options)
    options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.iterable:
        return DataLoader(dataset, **options)
    if loader.sampler is not None:
        return DataLoader(dataset, sampler=loader.sampler_of(rank), **options)
    if loader.per_rank:  # what a rank makes for itself is not divided
        return DataLoader(dataset, shuffle=bool(loader.shuffle), **options)
    if isinstance(order, UnevenOrder) and not order.even:
        raise UsageError(
            "plain DDP has no batch sizes per rank: a loader with a list of them, or with shards whose last step is not full, "
            "cannot be compared with it; drop_last=True leaves that step out"
        )
    if not isinstance(order, EvenOrder) or order.shuffle == "bijection":
        del options["batch_size"], options["drop_last"]
        return DataLoader(dataset, batch_sampler=_JobOrder(rank), **options)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset,
        num_replicas=order.virtual_workers,
        rank=rank,
        shuffle=order.shuffle,
        seed=order.seed,
        drop_last=not order.pad,
    )
    return DataLoader(dataset, sampler=sampler, **options)


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """As Accelerate's loaders do."""
    for batch in batches:
        for following in batches:
            yield batch
            batch = following
        yield batch


class _JobOrder:
    """A batch sampler with one of the job's orders that torch does not have."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.order: EpochOrder | None = None

    def __iter__(self) -> Iterator[list[int]]:
        assert self.order is not None
        return (self.order.indices(self.rank, batch) for batch in range(self.order.batches))


def _set_epoch(dataloader: DataLoader[Any], order: EpochOrder | None, epoch: int) -> None:
    """What a DDP script does when an epoch begins."""
    if isinstance(dataloader.batch_sampler, _JobOrder):
        dataloader.batch_sampler.order = order
    inner = getattr(dataloader.batch_sampler, "sampler", None)
    for sampler in (dataloader.batch_sampler, dataloader.sampler, inner):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
            return

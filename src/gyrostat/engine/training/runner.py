"""One pass: every virtual worker of this worker runs its micro-batches, then all workers settle.

This is the template that both runners fill in: `virtual.py` (the engine proper, N virtual workers on any number of
workers) and `reference.py` (torch's own DistributedDataParallel on N processes, which `verify` compares with).
What travels with a pass besides gradients is the same for both and is handled here: virtual worker 0's loss,
`job.mean` values, and requests that all workers must act on together.

Whatever workers do together is a unit, and units are counted: the reduction of a pass, or an `exchange`. If a worker is lost in
the middle of one, a runner that can recover does so here (`recover`): either another worker had completed the unit and tells
what came of it, or it is done once more by those that are left; a pass, after they have run the lost virtual workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from gyrostat.core.errors import Misuse, PeerLost
from gyrostat.core.placement import Placement
from gyrostat.core.progress import Progress
from gyrostat.data import evaluation
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.order import EpochOrder
from gyrostat.data.rng import Streams, seed_all
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.state import statetree
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.torch_internals import keeping_versions
from gyrostat.engine.trace import now
from gyrostat.engine.training.buffers import slots_of
from gyrostat.engine.training.mean import Mean, Means, MeanWire
from gyrostat.engine.transport.group import WorkerGroup


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step consists of, for every virtual worker."""

    loader: OrderedLoader
    order: EpochOrder | None
    """None: samplers or an iterable dataset decide what comes."""
    first_batch: int
    """The number, within the epoch, of the step's first micro-batch."""
    micro_batches: int
    """Micro-batches per virtual worker (`accumulate`)."""

    def weight(self, rank: int) -> float | None:
        """The share of virtual worker `rank` in this step; None if all are equal."""
        return None if self.order is None else self.order.weight(rank, self.first_batch)

    def samples(self, rank: int, number: int) -> list[int] | None:
        """The indices of a micro-batch's samples; None where the job does not order them."""
        return None if self.order is None else self.order.indices(rank, self.first_batch + number)

    def content(self, rank: int, number: int) -> list[int]:
        """What tells a micro-batch from others: its sample indices; where the job does not order them, its place."""
        samples = self.samples(rank, number)
        return [rank, self.first_batch + number] if samples is None else samples


@dataclass(frozen=True, kw_only=True)
class DataLoop:
    """One loop over a loader's micro-batches, from the beginning or from where it is taken up again."""

    loader: OrderedLoader
    order: EpochOrder | None
    epoch: int
    accumulate: int
    first_batch: int

    def is_same_as(self, other: DataLoop) -> bool:
        """The same micro-batches in the same order."""
        mine, theirs = (
            (loop.loader.number, loop.epoch, loop.accumulate, loop.first_batch) for loop in (self, other)
        )
        return mine == theirs


@dataclass(frozen=True)
class Requests:
    """What some worker was asked for from outside; when the pass has settled all workers know."""

    checkpoint: bool = False
    stop: bool = False
    written: bool = False
    """Not asked for, but told along the same way: worker 0's checkpoint is written, and it can take another."""

    def __or__(self, other: Requests) -> Requests:
        return Requests(
            self.checkpoint or other.checkpoint, self.stop or other.stop, self.written or other.written
        )


class RequestBox:
    """Where requests wait for the next pass to settle.

    Filled by signal handlers and by the thread that writes checkpoints, so every change is one assignment.
    """

    def __init__(self) -> None:
        self.checkpoint = False
        self.stop = False
        self.written = False
        self.orphaned = False
        """This worker's agent has been away for too long: a state, not a request, and over when an agent is back."""

    def put(self, requests: Requests) -> None:
        if requests.checkpoint:
            self.checkpoint = True
        if requests.stop:
            self.stop = True
        if requests.written:
            self.written = True

    def take(self) -> Requests:
        """What is asked for. Only what was seen is cleared: what arrives meanwhile stays for the next time."""
        requests = Requests(self.checkpoint, self.stop, self.written)
        if requests.checkpoint:
            self.checkpoint = False
        if requests.stop:
            self.stop = False
        if requests.written:
            self.written = False
        return requests


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """A generation, and the step at whose boundary it begins."""

    generation: int
    step: int


class PassReport(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells the others when its virtual workers have run."""

    losses: list[float]
    means: list[MeanWire]
    requests: Requests
    orphaned: bool
    """Its agent has been away for too long."""
    samples: int
    fence: Fence | None
    """Which generation may begin, and when, as far as this worker is concerned."""
    busy: float
    """Seconds that its virtual workers took, before it waits for others."""
    extra: bytes
    contexts: bytes
    """What the pass has changed in the contexts of its virtual workers; nothing if nobody keeps backups."""
    dropped: list[int]
    """Virtual workers that were lost with another worker, and are left out of this pass: in approximate recovery only."""
    leaving: bytes
    """Where virtual workers that will be elsewhere then will stand in the data: a tree of positions by rank, or nothing."""


_REPORT = msgspec.msgpack.Decoder(PassReport)


@dataclass
class MicroBatch:
    """The micro-batch that is running now."""

    rank: int
    number: int
    last: bool
    backward_done: bool = False


@dataclass
class PassOutcome:
    """What is known on every worker after a pass."""

    loss: float | None = None
    requests: Requests = field(default_factory=Requests)
    samples: int = 0
    """How many all virtual workers together have fetched in this step."""
    fence: Fence | None = None
    """A generation that begins: all workers have acknowledged it."""
    busy: tuple[float, ...] = ()
    """Seconds that the virtual workers of worker 0, 1, 2 … took."""
    leaving: dict[int, Any] = field(default_factory=dict)
    """Positions of virtual workers that will be elsewhere then, as trees."""


class Runner(ABC):
    """Runs the passes of one worker."""

    def __init__(self, *, placement: Placement, group: WorkerGroup, seed: int) -> None:
        self.placement, self.group, self.seed = placement, group, seed
        self.hosted: Sequence[int] = placement.held_by(group.rank)
        self.micro_batch: MicroBatch | None = None
        self.request_box = RequestBox()
        self.loop_batches: int | None = None
        """What `batches` said of the loop that is running."""
        self.handed_batches: tuple[int | None] | None = None
        """For a worker that joins in the middle of a loop: what it said to the others."""
        self.acknowledge: Callable[[int, int], Fence | None] = lambda step, lead: None
        self.supervisor: Supervisor | None = None
        """Is told which micro-batch runs."""
        self.streams = Streams()
        self._losses: list[torch.Tensor] = []
        self._means = Means()
        self._modules: dict[str, nn.Module] = {}
        self._pass_began = 0
        self._requests = Requests()
        self.completed_collectives = 0
        """How many have been completed, since the job began."""
        self.last_collective: list[bytes] = []
        """What all workers said in the last one: for a worker that has not heard it."""
        self.last_was_pass = False

    @property
    def recovers(self) -> bool:
        """The other workers can go on without one that is lost."""
        return False

    @property
    def leads(self) -> bool:
        """Virtual worker 0 runs here."""
        return 0 in self.hosted

    # What the two runners do differently.

    @abstractmethod
    def add_module(self, name: str, module: nn.Module, options: DdpOptions) -> None:
        """A module was tracked."""

    @property
    def reduced(self) -> frozenset[int] | None:
        """The identities of all parameters whose gradients are reduced; None if that is DDP's business."""
        return None

    @abstractmethod
    def start_streams(self) -> None:
        """The first `track`: virtual worker r's streams begin as if seeded with seed + r."""

    @abstractmethod
    def begin_loop(self, loop: DataLoop) -> None:
        """A loop over a loader begins."""

    @abstractmethod
    def available(self, count: int, progress: Progress) -> int:
        """How many of the next `count` micro-batches every virtual worker of the job has. All workers ask together."""

    @abstractmethod
    def end_loop(self, *, used_up: bool) -> None:
        """The loop is over: all micro-batches were consumed, or the script wants no more of them."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """How many samples the virtual workers here have fetched in this step."""

    def begin_data(self, plan: StepPlan, pass_: int) -> None:
        """Micro-batches are about to be fetched."""

    @abstractmethod
    def begin_pass(self) -> None: ...

    @abstractmethod
    def enter(self, rank: int, weight: float | None) -> None: ...
    @abstractmethod
    def fetch(self, plan: StepPlan, rank: int, number: int, pass_: int) -> Any: ...

    @abstractmethod
    def leave(self, rank: int) -> None: ...

    @abstractmethod
    def end_pass(self) -> bytes:
        """All virtual workers have run; what the other workers need to know before `settle`."""

    def send_off(self) -> None:
        """The envelope is on its way to the other workers: so may be all that they will surely need."""

    def complete(self, extras: Sequence[bytes]) -> None:
        """Wait until all has arrived that this worker needs to settle. Raises `PeerLost`."""

    @abstractmethod
    def settle(self, extras: Sequence[bytes]) -> None:
        """The reduction is complete."""

    def changed_contexts(self, pass_: int) -> bytes:
        """For the backups of the other workers."""
        return b""

    def take_contexts(self, changes: Sequence[bytes]) -> None:
        """The pass is complete: what all workers say of their contexts is so."""

    def recover(self, lost: PeerLost, plan: StepPlan | None) -> list[bytes] | None:
        """A worker was lost in the middle of a unit. Returns what all said in it, if it was completed somewhere.

        Otherwise it is to be done again; of a pass, `plan`, after `to_run_again` has been.
        """
        raise lost

    def to_run_again(self) -> Sequence[int]:
        """The virtual workers that came here in the middle of the pass."""
        return ()

    @property
    def dropped(self) -> Sequence[int]:
        """Those of them that are left out of the pass."""
        return ()

    def make_up_for(self, factor: float) -> None:
        """Some were left out of the pass: the mean over all is that over the others times this."""

    def prepare_again(self, plan: StepPlan, pass_: int) -> None:
        """They are about to run."""

    @abstractmethod
    def local(self, rank: int) -> dict[str, Any]: ...

    @property
    def fence_lead(self) -> int:
        """How many steps a change should be known before it takes place."""
        return 0

    def leaving(self, progress: Progress) -> bytes:
        """Positions of virtual workers that will soon be elsewhere, as far as they are known and not told yet."""
        return b""

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """The script is about to get this micro-batch."""

    def share_buffers_for_evaluation(self) -> None:
        """An evaluation sees virtual worker 0's buffers, on every worker."""

    def before_backward(self, micro_batch: MicroBatch) -> None:
        """The script has computed this micro-batch's loss."""

    def after_backward(self, micro_batch: MicroBatch) -> None:
        """The gradients of this micro-batch are there."""

    # The pass.

    def run_pass(self, plan: StepPlan, progress: Progress) -> Iterator[Any]:
        """Yield this worker's micro-batches; when they are done, settle with all workers."""
        self._losses, self._means = [], Means()
        self._pass_began = now()
        self._requests = Requests()
        self.begin_data(plan, progress.pass_)
        self.begin_pass()
        yield from self._run(self.hosted, plan, progress)
        while True:
            try:
                said, reports = self._reduce(progress)
            except PeerLost as lost:
                told = self.recover(lost, plan)
                if told is None:
                    self.prepare_again(plan, progress.pass_)
                    yield from self._run(self.to_run_again(), plan, progress)
                    continue
                said, reports = told, _decoded(told)
            break
        self._outcome = self._settle(plan, reports)
        self._completed(said, was_pass=True)

    def _run(self, ranks: Sequence[int], plan: StepPlan, progress: Progress) -> Iterator[Any]:
        """Hand the micro-batches of these virtual workers to the script."""
        tracer = self.group.tracer
        for rank in ranks:
            weight = plan.weight(rank)
            with tracer.span("switch", rank=rank):
                self.enter(rank, weight)
            for number in range(plan.micro_batches):
                with tracer.span("fetch", rank=rank):
                    batch = self.fetch(plan, rank, number, progress.pass_)
                micro_batch = MicroBatch(rank, number, last=number == plan.micro_batches - 1)
                self._means.begin_micro_batch()
                self.begin_micro_batch(micro_batch)
                self.micro_batch = micro_batch
                if self.supervisor is not None:
                    self.supervisor.runs(progress.step, rank, number, plan.samples(rank, number))
                began = now()
                yield batch
                if self.supervisor is not None:
                    self.supervisor.ran()
                if tracer.active:
                    span = f"virtual worker {rank}"
                    tracer.add(span, began, now(), step=progress.step, pass_=progress.pass_)
                self.micro_batch = None
                if not micro_batch.backward_done:
                    raise Misuse(
                        f"a micro-batch of virtual worker {rank} ended without step.backward(loss); call "
                        "step.backward(loss) instead of loss.backward()"
                    )
            with tracer.span("switch", rank=rank):
                self.leave(rank)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward()`, once per micro-batch."""
        micro_batch = self.current("step.backward")
        if micro_batch.backward_done:
            raise Misuse(
                "step.backward was called twice in one micro-batch; add the losses and call it once, or iterate `step` "
                "again for a second pass with a reduction of its own"
            )
        self.before_backward(micro_batch)
        with self.group.tracer.span("backward", rank=micro_batch.rank):
            loss.backward(**options)  # type: ignore[no-untyped-call]
        micro_batch.backward_done = True
        with self.group.tracer.span("hand over gradients", rank=micro_batch.rank):
            self.after_backward(micro_batch)
        if micro_batch.rank == 0:
            self._losses.append(loss.detach())

    def mean(self, value: torch.Tensor | float) -> Mean:
        return self._means.add(self.current("job.mean").rank, value)

    def current(self, what: str) -> MicroBatch:
        if self.micro_batch is None:
            raise Misuse(f"{what} only has a meaning inside the inner loop, `for … in step:`")
        return self.micro_batch

    @property
    def outcome(self) -> PassOutcome:
        return self._outcome

    def _reduce(self, progress: Progress) -> tuple[list[bytes], list[PassReport]]:
        """Exchange reports with all workers, and wait for the sums. Returns what all said, as it came and as it is meant."""
        extra = self.end_pass()
        busy = (now() - self._pass_began) / 1e9
        losses = [_value_of(loss) for loss in self._losses]
        self._requests |= self.request_box.take()  # kept, if this has to be done again
        mine = PassReport(
            losses,
            self._means.wire(),
            self._requests,
            self.request_box.orphaned,
            self.samples,
            self.acknowledge(progress.step, self.fence_lead),
            busy,
            extra,
            self.changed_contexts(progress.pass_),
            list(self.dropped),
            self.leaving(progress),
        )
        if self.group.size == 1:
            return [], [mine]  # nobody could have missed it
        others = self.group.begin_exchange("reduce", progress, msgspec.msgpack.encode(mine))
        self.send_off()
        payloads = others()
        reports = _decoded(payloads)
        with self.group.tracer.span("reduce"):
            self.complete([report.extra for report in reports])
        return payloads, reports

    def _settle(self, plan: StepPlan, reports: Sequence[PassReport]) -> PassOutcome:
        """The pass is complete on this worker: nothing can be lost any more."""
        dropped = {rank for report in reports for rank in report.dropped}
        self.settle([report.extra for report in reports])
        if dropped:
            ranks = self.placement.virtual_workers
            self.make_up_for(ranks / (ranks - len(dropped)))
        self.take_contexts([report.contexts for report in reports])
        if any(report.means for report in reports):
            shares = {rank: share for rank, share in self._shares(plan).items() if rank not in dropped}
            self._means.settle([report.means for report in reports], shares, plan.micro_batches)
        requests = Requests()
        for report in reports:
            requests |= report.requests
        if (all if self.recovers else any)(report.orphaned for report in reports):
            requests |= Requests(stop=True)  # with a checkpoint, before their fork parents kill them
        losses = [loss for report in reports for loss in report.losses]
        samples = sum(report.samples for report in reports)
        leaving: dict[int, Any] = {}
        for report in reports:
            if report.leaving:
                leaving |= statetree.decode(report.leaving)
        return PassOutcome(
            sum(losses) / len(losses) if losses else None,
            requests,
            samples,
            _agreed([report.fence for report in reports]),
            tuple(report.busy for report in reports),
            leaving,
        )

    def exchange(
        self, kind: str, progress: Progress, say: Callable[[], bytes], *, once: bool = False
    ) -> list[bytes]:
        """Give every worker everybody's payload. `say` is asked again if virtual workers have come here meanwhile.

        `once`: those that are left do not do it again if a worker is lost, for not all of them would: nothing is returned then.
        """
        while True:
            try:
                payloads = self.group.exchange(kind, progress, say())
            except PeerLost as lost:
                told = self.recover(lost, None)
                if told is None and once:
                    return []
                if told is None:
                    continue
                payloads = told
            self._completed(payloads)
            return payloads

    def _completed(self, payloads: list[bytes], *, was_pass: bool = False) -> None:
        self.completed_collectives += 1
        self.last_collective, self.last_was_pass = payloads, was_pass

    def _shares(self, plan: StepPlan) -> dict[int, float | None]:
        return {rank: plan.weight(rank) for rank in range(self.placement.virtual_workers)}

    # Data.

    def batches(self, loader: OrderedLoader, order: EpochOrder | None, progress: Progress) -> int | None:
        """How many micro-batches every virtual worker has in an epoch; None if that is not known before."""
        if self.handed_batches is not None:
            (self.loop_batches,) = self.handed_batches
            self.handed_batches = None
        else:
            self.loop_batches = self._count_batches(loader, order, progress)
        return self.loop_batches

    def _count_batches(
        self, loader: OrderedLoader, order: EpochOrder | None, progress: Progress
    ) -> int | None:
        if order is not None:
            return order.batches
        if loader.iterable:
            return None

        def fewest_here() -> int:
            return min(_length(loader.batched(loader.sampler_of(rank))) for rank in self.hosted)

        fewest = self._fewest("length", fewest_here, progress)
        return None if fewest < 0 else fewest

    def _fewest(self, what: str, mine: Callable[[], int], progress: Progress) -> int:
        """The smallest of all workers' numbers."""
        everyone = self.exchange(what, progress, lambda: mine().to_bytes(8, "little", signed=True))
        return min(int.from_bytes(number, "little", signed=True) for number in everyone)

    # Evaluation.

    def evaluate(
        self, loader: OrderedLoader, fn: Callable[[Any], Any], progress: Progress, call: int
    ) -> list[Any]:
        """fn of every micro-batch of the dataset, each sample once, in dataset order; micro-batch j by virtual rank j mod N.

        Every micro-batch has streams of its own, so results do not depend on who runs it. Streams, buffers and
        training modes are afterwards as they were.
        """
        evaluation.check_evaluable(loader)
        if self.micro_batch is not None:
            raise Misuse("job.evaluate inside the inner loop; call it after the update")
        mine: dict[int, Any] = {}

        def run() -> bytes:
            """What the virtual workers here have not run yet."""
            size, ranks = loader.batch_size or 1, self.placement.virtual_workers
            wanted = [
                (
                    j,
                    _evaluation_seed(self.seed, progress.step, call, j),
                    list(range(j * size, min((j + 1) * size, loader.length))),
                )
                for j in range(-(-loader.length // size))
                if j % ranks in self.hosted and j not in mine
            ]
            self._evaluate(loader, fn, wanted, mine)
            return statetree.encode(mine)

        results: dict[int, Any] = {}
        for payload in self.exchange("evaluate", progress, run):
            results.update(statetree.decode(payload))
        return [results[j] for j in sorted(results)]

    def _evaluate(
        self,
        loader: OrderedLoader,
        fn: Callable[[Any], Any],
        wanted: Sequence[tuple[int, int, list[int]]],
        results: dict[int, Any],
    ) -> None:
        """Fill in the results of these micro-batches: number, seed, samples."""
        before = self.streams.save()
        modes = {part: part.training for module in self._modules.values() for part in module.modules()}
        slots = [slot for module in self._modules.values() for slot in slots_of(module)]
        saved = [(holder[key], holder[key].detach().clone()) for holder, key in slots]
        self.share_buffers_for_evaluation()
        for module in self._modules.values():
            module.eval()
        try:
            with torch.no_grad():
                for (j, seed, _), batch in zip(wanted, evaluation.batches(loader, wanted), strict=True):
                    seed_all(seed)
                    results[j] = fn(batch)
        finally:
            for part, mode in modes.items():
                part.training = mode
            _put_back(slots, saved)
            self.streams.exchange(before)


def _decoded(payloads: Sequence[bytes]) -> list[PassReport]:
    return [_REPORT.decode(payload) for payload in payloads]


def _value_of(loss: torch.Tensor) -> float:
    """The mean, of a loss that the script has not reduced to one number."""
    return float((loss if loss.numel() == 1 else loss.double().mean()).item())


def _agreed(fences: Sequence[Fence | None]) -> Fence | None:
    """With one acknowledgement missing it holds nowhere; whoever needs most time says when."""
    given = [fence for fence in fences if fence is not None]
    if len(given) < len(fences) or len({fence.generation for fence in given}) > 1:
        return None
    return Fence(given[0].generation, max(fence.step for fence in given))


def _length(sampler: Any) -> int:
    """How many it gives; -1 if it does not say."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return -1


def _put_back(
    slots: Sequence[tuple[dict[str, Any], str]], saved: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """The tensors that stood in the slots, with the values they had, and as if nobody had touched them."""
    with torch.no_grad(), keeping_versions([tensor for tensor, _ in saved]):
        for (holder, key), (tensor, value) in zip(slots, saved, strict=True):
            tensor.copy_(value)
            holder[key] = tensor


def _evaluation_seed(*parts: int) -> int:
    """A seed from (seed, step, call, micro-batch) that does not collide by accident (SplitMix64)."""
    mixed = 0
    for part in parts:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1

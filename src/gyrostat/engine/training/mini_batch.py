"""One mini-batch, top to bottom. A step of the script is one pass over it, or several.

    _begin_pass      1  data, contexts and gradients begin the pass
    _run             2  switch in a virtual worker: its random streams and buffers
                     3  fetch its next micro-batch
                     4  the script runs it: forward, loss, `step.backward` (`backward`)
                     5  its gradients go to the reducers; switch it out; go on with 2 for the next local virtual worker
    _exchange        6  end the pass here, and send this worker's report to all others
                     7  reduce gradients, broadcast virtual worker 0's buffers, and wait for both
    _settle          8  set gradients to the mean over all virtual workers, and buffers to the shared ones
                     9  apply what the pass changed in contexts to the backups, and publish the outcome

A survey (`step.survey`) is a pass without a backward: 1 to 9 with no gradients, and what its body draws or does to buffers
is undone. It fetches the step's micro-batches, so that values of all virtual workers are known before the backward pass.

If a worker is lost in 6 or 7, the survivors recover (`engine/reconfigure/recovery.py`). Either one of them had completed the
pass, and the others receive what they missed; or all repeat it from 6, after 2 to 5 for the virtual workers that arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from gyrostat.core.errors import Misuse, PeerLost
from gyrostat.core.progress import Progress
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.trace import now
from gyrostat.engine.training.buffers import restore_buffers, slots_of
from gyrostat.engine.training.collectives import CollectiveLog, PeerRecovery
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.mean import Mean, MeanKind, Means
from gyrostat.engine.training.parts import Batches, Buffers, ComputeDevice, Contexts, Gradients
from gyrostat.engine.training.plan import MicroBatch, StepPlan
from gyrostat.engine.training.relocation import NoRelocation
from gyrostat.engine.training.reports import (
    Acknowledge,
    PassOutcome,
    PassReport,
    RequestBox,
    Requests,
    decode,
    merge,
    scalar,
)


@dataclass(frozen=True, kw_only=True)
class MiniBatchParts:
    """What a mini-batch runner drives."""

    generation: CurrentGeneration
    contexts: Contexts
    batches: Batches
    gradients: Gradients
    buffers: Buffers
    relocation: NoRelocation
    recovery: PeerRecovery
    log: CollectiveLog
    device: ComputeDevice


@dataclass
class _Pass:
    """What this worker collects during a pass."""

    began: int
    losses: list[torch.Tensor] = field(default_factory=list)  # virtual worker 0's
    means: Means = field(default_factory=Means)
    survey: bool = False
    requests: Requests = field(default_factory=Requests)


class MiniBatchRunner:
    """Runs the passes of one worker."""

    def __init__(
        self, parts: MiniBatchParts, *, supervisor: Supervisor, requests: RequestBox, acknowledge: Acknowledge
    ) -> None:
        self.parts, self._supervisor = parts, supervisor
        self._request_box, self._acknowledge = requests, acknowledge
        self._fetch = parts.device.fetch_from(parts.batches)
        self._pass = _Pass(0)
        self._modules: list[nn.Module] = []
        self.micro_batch: MicroBatch | None = None
        """The one that the script is running."""
        self.outcome = PassOutcome()
        """Of the last pass."""

    def add_module(self, name: str, module: nn.Module, options: DdpOptions) -> None:
        """A module was tracked."""
        parts = self.parts
        self._modules.append(module)
        parts.device.add(name, module)
        trained = parts.gradients.add(name, module, options)
        parts.buffers.add(name, module, trained=trained, broadcast=options.broadcast_buffers)

    def run_pass(self, plan: StepPlan, progress: Progress, *, survey: bool = False) -> Iterator[Any]:
        """Yield the micro-batches of the local virtual workers; then complete the pass with all workers."""
        self._begin_pass(plan, progress, survey=survey)
        run = self._survey if survey else self._run
        yield from run(self.parts.generation.local_ranks, plan, progress)
        while True:
            try:
                payloads, reports = self._exchange(progress)
            except PeerLost as lost:
                missed = self.parts.recovery.recover(lost, plan)
                if missed is None:
                    self.parts.relocation.prepare_arrivals(plan, progress.pass_, survey=survey)
                    yield from run(self.parts.relocation.arrivals, plan, progress)
                    continue
                payloads, reports = missed, decode(missed)
            break
        self._settle(plan, reports)
        self.parts.log.add(payloads, was_pass=True)

    def _begin_pass(self, plan: StepPlan, progress: Progress, *, survey: bool) -> None:
        parts = self.parts
        # 1. Data first: it may draw from the virtual workers' streams.
        self._pass = _Pass(now(), survey=survey)
        parts.batches.begin_pass(plan, progress.pass_)
        parts.relocation.begin_pass()
        parts.contexts.begin_pass()
        parts.gradients.begin_pass()

    def _run(self, ranks: Sequence[int], plan: StepPlan, progress: Progress) -> Iterator[Any]:
        parts, supervisor = self.parts, self._supervisor
        contexts, gradients = parts.contexts, parts.gradients
        local_ranks, arrivals = parts.generation.local_ranks, parts.relocation.arrivals
        tracer = parts.generation.group.tracer
        for rank in ranks:
            # 2. Switch in.
            weight = plan.weight(rank)
            with tracer.span("switch", rank=rank):
                contexts.switch_in(rank)
                gradients.begin_rank(rank, weight, last_here=rank == local_ranks[-1] and rank not in arrivals)
            for number in range(plan.micro_batches):
                # 3. Fetch.
                with tracer.span("fetch", rank=rank):
                    batch = self._fetch(plan, rank, number, progress.pass_)
                micro_batch = MicroBatch(rank, number, last=number == plan.micro_batches - 1)
                self._begin_micro_batch(micro_batch)
                supervisor.runs(progress.step, rank, number, plan.samples(rank, number))
                # 4. The script runs it, and calls `backward`.
                began = now()
                yield batch
                supervisor.ran()
                if tracer.active:
                    span = f"virtual worker {rank}"
                    tracer.add(span, began, now(), step=progress.step, pass_=progress.pass_)
                self.micro_batch = None
                if not micro_batch.backward_done:
                    raise Misuse(
                        f"a micro-batch of virtual worker {rank} ended without step.backward(loss); call "
                        "step.backward(loss) instead of loss.backward()"
                    )
            # 5. Switch out.
            with tracer.span("switch", rank=rank):
                contexts.switch_out(rank)

    def _survey(self, ranks: Sequence[int], plan: StepPlan, progress: Progress) -> Iterator[Any]:
        """Steps 2 to 5 of a survey. Afterwards streams have drawn what fetching draws, and nothing else has changed."""
        contexts, supervisor = self.parts.contexts, self._supervisor
        slots = [slot for module in self._modules for slot in slots_of(module)]
        saved = [(holder[key], holder[key].detach().clone()) for holder, key in slots]
        for rank in ranks:
            contexts.switch_in(rank, survey=True)
            for number in range(plan.micro_batches):
                batch = self._fetch(plan, rank, number, progress.pass_)
                self._pass.means.begin_micro_batch()
                self.micro_batch = MicroBatch(rank, number, last=number == plan.micro_batches - 1)
                supervisor.runs(progress.step, rank, number, plan.samples(rank, number))
                fetched, grad_mode = contexts.streams.save(), torch.is_grad_enabled()
                torch.set_grad_enabled(False)  # in the body of the script's loop
                try:
                    yield batch
                finally:
                    torch.set_grad_enabled(grad_mode)
                supervisor.ran()
                self.micro_batch = None
                contexts.streams.exchange(fetched)
            restore_buffers(slots, saved)
            contexts.switch_out(rank, survey=True)

    def _begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        parts, last = self.parts, micro_batch.last
        self._pass.means.begin_micro_batch()
        parts.contexts.begin_micro_batch(last=last)
        parts.gradients.begin_micro_batch(last=last)
        parts.device.begin()
        self.micro_batch = micro_batch

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward()`, once per micro-batch."""
        micro_batch = self.current("step.backward")
        if self._pass.survey:
            raise Misuse("step.backward in a survey, which has no gradients; call it in `for … in step:`")
        if micro_batch.backward_done:
            raise Misuse(
                "step.backward was called twice in one micro-batch; add the losses and call it once, or iterate `step` "
                "again for a second pass with a reduction of its own"
            )
        gradients, tracer = self.parts.gradients, self.parts.generation.group.tracer
        gradients.before_backward(first=micro_batch.number == 0)
        with tracer.span("backward", rank=micro_batch.rank):
            loss.backward(**options)  # type: ignore[no-untyped-call]
        micro_batch.backward_done = True
        # 5. Gradients out.
        with tracer.span("hand over gradients", rank=micro_batch.rank):
            self.parts.device.wait()
            gradients.after_backward(last=micro_batch.last)
        if micro_batch.rank == 0:
            self._pass.losses.append(loss.detach())

    def _exchange(self, progress: Progress) -> tuple[Sequence[bytes], list[PassReport]]:
        """Returns the reports of all workers, encoded and decoded."""
        parts = self.parts
        # 6. End the pass here, and report.
        parts.relocation.end_pass()
        parts.contexts.end_pass()
        mine = self._report(progress)
        group = parts.generation.group
        if group.size == 1:
            return [], [mine]  # no other worker can miss it
        wait_for_reports = group.begin_exchange("reduce", progress, msgspec.msgpack.encode(mine))
        # 7. Reduce gradients and broadcast buffers, while the reports travel.
        self._send_off()
        payloads = wait_for_reports()
        reports = decode(payloads)
        with group.tracer.span("reduce"):
            self._complete(reports)
        return payloads, reports

    def _report(self, progress: Progress) -> PassReport:
        parts = self.parts
        participation = parts.gradients.participation()
        busy = (now() - self._pass.began) / 1e9
        losses = [scalar(loss) for loss in self._pass.losses]
        self._pass.requests |= self._request_box.take()  # kept, if the report has to be sent again
        return PassReport(
            losses,
            self._pass.means.wire(),
            self._pass.requests,
            self._request_box.agent,
            parts.batches.samples,
            self._acknowledge(progress.step, parts.relocation.fence_lead),
            busy,
            participation,
            parts.relocation.changed_contexts(progress.pass_),
            list(parts.relocation.dropped),
            parts.relocation.leaving(progress),
        )

    def _send_off(self) -> None:
        self.parts.gradients.send_off()
        self.parts.buffers.send_off()

    def _complete(self, reports: Sequence[PassReport]) -> None:
        self.parts.gradients.complete([report.participation for report in reports])
        self.parts.buffers.complete()

    def _settle(self, plan: StepPlan, reports: Sequence[PassReport]) -> None:
        """The pass is complete on this worker: a death cannot undo it any more."""
        parts = self.parts
        # 8. Gradients and buffers.
        dropped = {rank for report in reports for rank in report.dropped}
        parts.gradients.settle([report.participation for report in reports])
        parts.buffers.settle()
        if dropped:
            parts.gradients.compensate(len(dropped))
        # 9. Contexts, means, and what all workers know now.
        parts.relocation.pass_completed([report.contexts for report in reports])
        if any(report.means for report in reports):
            ranks = range(parts.generation.placement.virtual_workers)
            weights = {rank: plan.weight(rank) for rank in ranks if rank not in dropped}
            self._pass.means.settle([report.means for report in reports], weights, plan.micro_batches)
        self.outcome = merge(reports, recovers=parts.recovery.available)

    # What the script asks inside the inner loop.

    def current(self, what: str) -> MicroBatch:
        if self.micro_batch is None:
            raise Misuse(f"{what} only has a meaning inside the inner loop, `for … in step:`")
        return self.micro_batch

    def mean(self, value: torch.Tensor | float, kind: MeanKind = MeanKind.MEAN) -> Mean:
        """`job.mean`, `job.sum` and `job.gather`."""
        return self._pass.means.add(self.current(f"job.{kind.value}").rank, value, kind)

    @property
    def in_backward_pass(self) -> bool:
        """A micro-batch is running that ends with a backward."""
        return self.micro_batch is not None and not self._pass.survey

    def local(self) -> dict[str, Any]:
        """`step.local`."""
        return self.parts.contexts.local(self.current("step.local").rank)

    def broke_off(self) -> None:
        """The script has left the inner loop in the middle of a pass."""
        self.micro_batch = None

"""The loops of a job with servers: what `Job` forwards to once a script has called `gyrostat.servers`.

A worker asks the leader for a shard, trains its batches that some slot lacks, and reports it when every slot has acknowledged
them. The loop over an epoch ends when the leader says that the epoch is over, whoever trained it. If a server is lost
and the queues go back with the parameters (`TermOver`), the batch in hand is dropped and the loop goes on with what the leader
hands out then, which may belong to an earlier epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.core.job import ReductionChoice, ReductionOrder
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.shards.messages import EpochOver, Shard
from gyrostat.engine.reduce.buckets import DdpOptions
from gyrostat.engine.script.between_steps import BetweenSteps
from gyrostat.engine.script.step import AnyStep
from gyrostat.engine.script.tracked import Tracked
from gyrostat.engine.script.training_loop import JobStopRequested
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.training.mean import Mean, MeanKind
from gyrostat.engine.training.reports import RequestBox
from gyrostat.ps.client.port import Batch, DataSpec, ParameterServers, TermOver
from gyrostat.ps.protocol.delivery import ShardBatches
from gyrostat.ps.script.batch_exchange import BatchExchange
from gyrostat.ps.script.dense_part import DensePart
from gyrostat.ps.script.server_evaluation import ServerEvaluator
from gyrostat.ps.script.server_loader import ServerLoader, make_server_loader
from gyrostat.ps.script.server_step import ServerStep
from gyrostat.ps.script.table import ServerTable
from gyrostat.ps.store.spec import StepOrder, StoreSpec

_REDUCTION = ReductionChoice(
    order=ReductionOrder.DDP, carrier=None, reason="servers add gradients in the order of virtual ranks"
)


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """What the loops join together."""

    servers: ParameterServers
    exchange: BatchExchange
    tables: Sequence[ServerTable]
    dense: Sequence[DensePart]
    supervisor: Supervisor
    requests: RequestBox
    seed: int
    staleness: int | None
    virtual_workers: int
    slots: int
    record: bool
    remote: bool
    """The servers are other processes, whose leader knows the job's digest."""


class ServerLoops:
    """One worker's loops."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts
        self._evaluator = ServerEvaluator(parts.servers, parts.exchange, parts.dense, seed=parts.seed)
        self._data: DataSpec | None = None
        self.opened = False
        """Tables, modules and data are fixed."""
        self._loop_epoch = 0
        self._batch: Batch | None = None
        self._step: ServerStep | None = None
        self._in_steps = False
        self._left_midway = False
        self._epochs_begun = False
        self._last_loop: int | None = None
        """The epoch of the last `job.steps` loop."""
        self._stop_refusing: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """These are the job's loops from now on: torch's optimizers must not update anything."""
        self._stop_refusing = register_optimizer_step_pre_hook(_refuse_update).remove

    # Where the job is.

    @property
    def step(self) -> int:
        """Updates of all workers that are reported; of an ordered job, its complete steps."""
        progress = self._parts.servers.progress
        return progress.updates if self._parts.staleness is None else progress.committed

    @property
    def epoch(self) -> int:
        """That of the batch that is running, or else of the loop."""
        return self._loop_epoch if self._batch is None else self._batch.epoch

    @property
    def is_main(self) -> bool:
        return self._parts.servers.progress.is_main

    @property
    def tracked(self) -> Tracked:
        raise Misuse(
            "job.state and job.tracked in a job with servers: workers come and go and share nothing but tables and tracked "
            "modules; keep what all need in one of those"
        )

    # Setting up.

    def shards(
        self, dataset: Any, batch_size: Any, name: str, others: dict[str, Any], **options: Any
    ) -> OrderedLoader:
        """`job.shards`. A script may call it in every epoch, with the same data."""
        loader = make_server_loader(
            dataset,
            batch_size,
            others,
            seed=self._parts.seed,
            ordered=self._parts.staleness is not None,
            **options,
        )
        if self._data is not None and loader.data != self._data:
            raise UsageError(
                f"job.shards with other data than before: {loader.data}, not {self._data}; a job with servers trains on one "
                "dataset"
            )
        self._data = loader.data
        return loader

    def track(self, things: dict[str, Any], options: DdpOptions, *, same_streams: bool = False) -> None:
        raise Misuse(
            "job.track in a job with servers: its parameters are there; use servers.track(model=model, optimizer=Adam(lr=…)) "
            "with an optimizer of gyrostat.optim"
        )

    def _open_servers(self) -> None:
        """Before the first loop: tables, modules and data are known."""
        if self.opened:
            return
        parts = self._parts
        if self._data is None:
            raise Misuse("the training data is not known yet; make its loader first: job.shards(…)")
        if not parts.tables and not parts.dense:
            raise Misuse("there is nothing to train: declare servers.table(…) or servers.track(…) first")
        order = None
        if parts.staleness is not None:
            batches = -(-self._data.samples // self._data.batch_size)
            order = StepOrder(
                staleness=parts.staleness, virtual_workers=parts.virtual_workers, batches=batches
            )
        spec = StoreSpec(
            slots=parts.slots,
            tables=tuple(table.spec for table in parts.tables),
            dense=tuple(part.spec for part in parts.dense),
            order=order,
            record=parts.record,
        )
        parts.servers.open(spec, self._data)
        parts.servers.begin_dense({number: part.values for number, part in enumerate(parts.dense)})
        self.opened = True
        parts.supervisor.started(self.step, None, [], parts.virtual_workers, _REDUCTION, {})

    # The loops.

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs that are over when the worker asks are left out: others have trained them."""
        if self._epochs_begun:
            raise Misuse("job.epochs was called twice; a job with servers has one loop over epochs")
        self._epochs_begun = True
        epoch = self._parts.servers.progress.epoch
        while epoch < count:
            self._loop_epoch = epoch
            yield epoch
            self._require_complete()
            epoch = max(epoch + 1, self._parts.servers.progress.epoch)

    def steps(self, loader: OrderedLoader, accumulate: int, limit: int | None) -> Iterator[AnyStep]:
        """The batches that this worker gets until the epoch is over."""
        if not isinstance(loader, ServerLoader):
            raise UsageError(
                "with servers job.steps needs a loader of job.shards, whose shards the leader hands out"
            )
        if accumulate != 1 or limit is not None:
            raise UsageError(
                "job.steps(accumulate=…, limit=…) has no meaning with servers: a batch is an update, and an epoch belongs to "
                "all workers together"
            )
        self._require_complete()
        self._open_servers()
        if self._last_loop == self._loop_epoch:
            raise Misuse(
                f"a second job.steps loop over epoch {self._loop_epoch}, which is over; use `for epoch in job.epochs(count)`"
            )
        self._last_loop = self._loop_epoch
        return self._run(loader, self._loop_epoch)

    def _run(self, loader: ServerLoader, epoch: int) -> Iterator[AnyStep]:
        servers, exchange = self._parts.servers, self._parts.exchange
        complete, self._in_steps = False, True
        try:
            while True:
                answer = servers.next_shard(epoch)
                if isinstance(answer, EpochOver):
                    break
                try:
                    yield from self._train(loader, answer)
                except TermOver:
                    exchange.drop()
            complete = True
        finally:
            self._batch = self._step = None
            self._in_steps = False
            self._left_midway |= not complete
        exchange.pull_dense()  # a script that looks at its modules now sees the epoch's last updates, whoever made them
        self._evaluator.epoch_over(epoch)

    def _train(self, loader: ServerLoader, shard: Shard) -> Iterator[AnyStep]:
        """The batches of a shard that some slot lacks."""
        servers, exchange, supervisor = self._parts.servers, self._parts.exchange, self._parts.supervisor
        work = ShardBatches(shard, loader.data.batch_size)
        if self._parts.staleness is None:
            work.skip(servers.which_applied(work.asked).tolist())
        for number, positions in work:
            self._answer_requests(shard, positions.start - shard.start)
            rank = number % self._parts.virtual_workers
            samples = loader.samples(shard.epoch, positions)
            supervisor.runs(self.step, rank, number, samples)
            self._batch = Batch(shard.epoch, number)
            content = loader.batch(shard.epoch, number, samples)
            exchange.begin(self._batch, content)
            self._step = ServerStep(content, number=number, virtual_rank=rank, computed=exchange.end)
            yield self._step
            self._step.require_complete()
            supervisor.ran()
            supervisor.stepped(self.step, shard.epoch, self._step.loss, len(positions))
        self._batch = self._step = None
        exchange.flush()
        servers.report(shard, len(shard))

    def _answer_requests(self, shard: Shard, done: int) -> None:
        """Between two batches: a checkpoint or the end of this worker may have been requested."""
        requests = self._parts.requests.take()
        if requests.checkpoint:
            self.save()
        if requests.stop:
            self._parts.exchange.flush()
            self._parts.servers.report(shard, done)
            self._parts.servers.close()
            raise JobStopRequested(0)

    # What a script may ask for.

    def mean(self, value: torch.Tensor | float, kind: MeanKind = MeanKind.MEAN) -> Mean:
        if self._step is None:
            raise Misuse(f"job.{kind.value} outside the inner loop")
        return self._step.mean(value, kind)

    @property
    def is_behind(self) -> bool:
        """Workers keep nothing between batches, so none repeats what the job has done before."""
        return False

    @property
    def between_steps(self) -> BetweenSteps:
        raise Misuse(
            "job.between_steps in a job with servers: its workers do nothing together; integrations of other frameworks need "
            "a job without gyrostat.servers"
        )

    def evaluate(self, loader: OrderedLoader, fn: Callable[[Any], Any]) -> list[Any]:
        self.require_no_loop("job.evaluate")
        self._require_complete()
        self._open_servers()
        return self._evaluator.run(loader, fn)

    def log(self, metrics: dict[str, float]) -> None:
        """Of the main worker, as elsewhere: what all workers know after an evaluation is shown once."""
        if self.is_main:
            self._parts.supervisor.logged(self.step, metrics)
            self._parts.servers.log(metrics)

    def save(self) -> None:
        """A checkpoint of all servers and the queues; any worker may request it, at any time."""
        self._open_servers()
        self._parts.servers.save()

    def require_no_loop(self, what: str) -> None:
        """Raise `Misuse` inside a loop over steps."""
        if self._in_steps:
            raise Misuse(
                f"{what} inside job.steps: other workers are training, so that no read would be consistent; call it after the "
                "loop"
            )

    def _require_complete(self) -> None:
        if self._left_midway:
            raise Misuse(
                f"the job.steps loop of epoch {self._loop_epoch} was left before the epoch was over (a `break`?); with servers "
                "an epoch belongs to all workers: run the loop to its end"
            )

    # The end.

    def hand_over(self) -> None:
        raise Misuse("gyrostat.servers was called twice; a job has one set of servers")

    def finish(self, exit: SystemExit | None = None) -> None:
        """The script has ended. What this worker still holds is given back."""
        parts = self._parts
        self._stop_refusing()
        digest = ""
        if self.opened:
            digest = "" if parts.remote else parts.servers.digest()
        parts.servers.close()
        parts.supervisor.finished(self.step, digest)


def _refuse_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise Misuse(
        f"torch.optim.{type(optimizer).__name__} made an update in a job with servers: parameters are updated there. Remove "
        "optimizer.step(), and give servers.track an optimizer of gyrostat.optim"
    )

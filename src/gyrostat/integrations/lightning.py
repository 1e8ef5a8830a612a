"""Lightning's `Trainer` on virtual workers: `Trainer(strategy=GyrostatStrategy())`.

Lightning's own loops run. `process_dataloader` gives them one item per batch of a rank: a step of the job, and before it one
stand-in for each further batch of an accumulation. `training_step` runs the first micro-batch of the step and `backward` the
others, so that Lightning's closure is what it expects. What a module logs is gathered over all virtual workers, and given to
Lightning as its DDP strategy would compute it (`lightning_logs.py`).

The state of the loops is tracked like the model (`LightningProgress`), so that it resumes, and newcomers join, at its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from gyrostat.integrations import environment, launch

launch.hide_launcher()

from lightning.fabric.utilities.seed import reset_seed  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.trainer.connectors.data_connector import (  # noqa: E402
    _get_distributed_sampler,
    _is_dataloader_shuffled,
    _parse_num_batches,
)
from lightning.pytorch.trainer.states import RunningStage  # noqa: E402
from lightning.pytorch.utilities.data import _update_dataloader  # noqa: E402

from gyrostat.core.errors import Misuse, NotYet, Refused  # noqa: E402
from gyrostat.engine.script.job import Job  # noqa: E402
from gyrostat.engine.script.step import AnyStep, Step  # noqa: E402
from gyrostat.integrations.batches import draw_base_seed, evaluation_of, in_turn, loader_options  # noqa: E402
from gyrostat.integrations.lightning_logs import LogCall, Logs, reduce_in_order  # noqa: E402
from gyrostat.integrations.lightning_progress import LightningProgress  # noqa: E402
from gyrostat.integrations.ranks import rank_sampler, seeded_workers  # noqa: E402


class Substep:
    """Stands in for a batch of an accumulation before the last, in which all of them run."""


class TrainingBatches:
    """Lightning's data loader in `fit`."""

    def __init__(self, strategy: GyrostatStrategy, loader: DataLoader[Any]) -> None:
        self._strategy, self._job = strategy, strategy.job
        trainer = strategy.trainer
        self._accumulate = trainer.accumulate_grad_batches
        self._loader = self._job.dataloader(
            loader.dataset,
            batch_sampler=lambda rank: rank_sampler(loader.batch_sampler, rank),
            **loader_options(loader, seeded_workers(loader)),
        )
        batches = _parse_num_batches(RunningStage.TRAINING, len(self._loader), trainer.limit_train_batches)
        self._limit = None
        if batches < len(self._loader):
            if batches % self._accumulate:
                raise NotYet(
                    f"limit_train_batches={trainer.limit_train_batches} leaves {batches} batches, which are no multiple of "
                    f"accumulate_grad_batches={self._accumulate}; choose one"
                )
            self._limit = batches // self._accumulate
        count = trainer.max_epochs if trainer.max_epochs not in (None, -1) else sys.maxsize
        self._epochs = self._job.epochs(count)
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Begins when the first batch is asked for: what is before it belongs to the time before the epoch."""
        wanted = self._strategy.trainer.current_epoch
        while self._epoch < wanted:
            following = next(self._epochs, None)
            if following is None:
                return
            self._epoch = following
        first = True
        for step in self._job.steps(self._loader, accumulate=self._accumulate, limit=self._limit):
            if first and step.number:  # Lightning counts what has been fetched
                self._strategy.trainer.fit_loop._data_fetcher.fetched += step.number * self._accumulate
            first = False
            for _ in range(step.micro_batches - 1):
                yield Substep()
            yield step

    def end(self) -> None:
        """Training is over; a job that had ended before has its last state now."""
        next(self._epochs, None)
        self._epochs.close()  # type: ignore[attr-defined]


class EvaluatedBatches:
    """Lightning's data loader in validation, test and prediction: what the virtual workers have computed, batch by batch."""

    def __init__(
        self, strategy: GyrostatStrategy, loader: DataLoader[Any], of_rank: Sequence[Sequence[Any]]
    ) -> None:
        """`of_rank`: the batches of each rank; one item has one batch of each."""
        self._strategy, self._original, self._of_rank = strategy, loader, of_rank
        self.dataset, self.batch_size, self.num_workers = (
            loader.dataset,
            loader.batch_size,
            loader.num_workers,
        )

    def __len__(self) -> int:
        return max(len(batches) for batches in self._of_rank)

    def __iter__(self) -> Iterator[Any]:
        strategy, job, trainer = self._strategy, self._strategy.job, self._strategy.trainer
        if not trainer.sanity_checking:
            draw_base_seed(job, self._original)
        limit = trainer.num_sanity_val_steps if trainer.sanity_checking else len(self)
        ranks, stage = len(self._of_rank), _step_name(trainer)
        batches = in_turn([each[: int(min(limit, len(self)))] for each in self._of_rank])
        results = job.evaluate(
            evaluation_of(job, self._original, batches),
            lambda batch: strategy.evaluate(stage, batch[0] // ranks, batch[1]),
        )
        for first in range(0, len(results), ranks):
            yield results[first : first + ranks]


class GyrostatStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Lightning's strategy for a job of gyrostat. Its world is the job's N virtual workers."""

    strategy_name = "gyrostat"

    def __init__(self, **options: Any) -> None:
        self.job: Job = launch.join(environment.lightning_seed())
        super().__init__(device=self.job.device, **options)
        self.trainer: Any = None
        self._batches: TrainingBatches | None = None
        self._step: AnyStep | None = None
        self._micro: Iterator[Any] = iter(())
        self._logs = Logs()

    # The world.

    @property
    def world_size(self) -> int:
        return self.job.virtual_workers

    @world_size.setter
    def world_size(self, _: int) -> None:
        """It is the job's."""

    @property
    def global_rank(self) -> int:
        return 0 if self.job.is_main else 1

    @global_rank.setter
    def global_rank(self, _: int) -> None:
        """It is the job's."""

    @property
    def is_global_zero(self) -> bool:
        return self.job.is_main

    def barrier(self, *_: Any, **__: Any) -> None:
        self.job.between_steps.barrier()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Of the values of all virtual workers, which `lightning_logs` gives; any other value is the same on all workers."""
        return reduce_in_order(tensor, self.job.virtual_workers, str(reduce_op))

    # Setting up.

    def connect(self, model: Any) -> None:
        super().connect(model)
        if not model.automatic_optimization:
            raise Refused(
                f"{type(model).__name__} uses manual optimization: it updates inside training_step, which every virtual worker "
                "runs, one after the other. Use automatic optimization, or a loop of your own on gyrostat"
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()  # as Lightning's DDP strategy does

    def setup(self, trainer: Any) -> None:
        self.trainer = trainer
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if self.job.tracked:
            raise Misuse("Trainer.fit was called twice in one job; fit once per job")
        things: dict[str, Any] = {f"optimizer{number}": each for number, each in enumerate(self.optimizers)}
        things |= {
            f"schedule{number}": each.scheduler for number, each in enumerate(self.lr_scheduler_configs)
        }
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            things["scaler"] = scaler
        self.job.track(
            model=self.lightning_module, lightning=LightningProgress(self), same_streams=True, **things
        )
        self.job.between_steps.share_modules()

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer
        self.trainer = trainer
        if not isinstance(dataloader, DataLoader) or dataloader.batch_sampler is None:
            raise NotYet(
                f"a {type(dataloader).__name__} with a dataset that has no length is not divided among virtual workers; give a "
                "DataLoader of a dataset with __len__ and __getitem__"
            )
        if trainer.predicting:
            return EvaluatedBatches(self, dataloader, [list(dataloader.batch_sampler)])
        dataloader = _distributed(trainer, dataloader, self.job.virtual_workers)
        if trainer.training:
            self._batches = TrainingBatches(self, dataloader)
            return self._batches
        ranks = range(self.job.virtual_workers)
        return EvaluatedBatches(
            self, dataloader, [list(rank_sampler(dataloader.batch_sampler, rank)) for rank in ranks]
        )

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, Step | Substep | list) and not self._inside:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    _inside = False

    def _on_device(self, batch: Any) -> Any:
        self._inside = True
        try:
            batch = self.precision_plugin.convert_input(batch)
            batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            return self.batch_to_device(batch, dataloader_idx=0)
        finally:
            self._inside = False

    # A step of training.

    def training_step(self, item: Any, batch_idx: int = 0, *_: Any) -> Any:
        if isinstance(item, Substep):
            return torch.zeros((), device=self.root_device, requires_grad=True)
        if item.micro_batches == 1:
            # Lightning zeroes gradients after the first forward; a pass begins with those that there are.
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self._step, self._index, self._micro = item, batch_idx, iter(item)
        self._first_index = batch_idx - item.micro_batches + 1
        self._gathered: list[Any] = []
        return self._forward(next(self._micro))

    def _forward(self, batch: Any) -> Any:
        """The module's own `training_step`; what it logs becomes values of all virtual workers."""
        assert self._step is not None
        batch = self._on_device(batch)
        number = self._step.micro_batch
        with self._logs.recording(self.lightning_module, batch) as logged:
            with self.precision_plugin.train_step_context():
                arguments = [batch, self._first_index + number][
                    : _arguments(self.lightning_module.training_step)
                ]
                output = self.lightning_module.training_step(*arguments)
        self._gathered = [(each, self.job.gather(each.value)) for each in logged]
        return output

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *_: Any, **__: Any) -> torch.Tensor:
        step, module, precision = self._step, self.lightning_module, self.precision_plugin
        if step is None:
            return closure_loss
        loss: torch.Tensor = closure_loss
        while True:
            loss = precision.pre_backward(loss, module)
            step.backward(loss)
            precision.post_backward(loss, module)
            batch = next(self._micro, None)
            if batch is None:
                break
            output = self._forward(batch)
            loss = (
                output["loss"] if isinstance(output, dict) else output
            ) / self.trainer.accumulate_grad_batches
        self._step = None
        self._logs.replay(module, "training_step", [(each, handle.value) for each, handle in self._gathered])
        return closure_loss

    # Evaluation.

    def evaluate(self, stage: str, index: int, batch: Any) -> dict[str, Any]:
        """Run validation_step, test_step or predict_step of a virtual worker. Returns its output and what it logged."""
        module, context = (
            self.lightning_module,
            getattr(self.precision_plugin, f"{stage[:-5].replace('validation', 'val')}_step_context"),
        )
        batch = self._on_device(batch)
        step = getattr(module, stage)
        with self._logs.recording(module, batch) as logged, context():
            output = step(*[batch, index][: _arguments(step)])
        return {"logged": [each.tree() for each in logged], "output": output}

    def _replay(self, stage: str, results: Sequence[dict[str, Any]]) -> Any:
        of_rank = [[LogCall.of_tree(each) for each in result["logged"]] for result in results]
        values = [
            (calls[0], torch.stack([each.value for each in calls])[:, None])
            for calls in zip(*of_rank, strict=True)
        ]
        self._logs.replay(self.lightning_module, stage, values)
        return results[0]["output"]

    def validation_step(self, item: Any, *_: Any) -> Any:
        return self._replay("validation_step", item)

    def test_step(self, item: Any, *_: Any) -> Any:
        return self._replay("test_step", item)

    def predict_step(self, item: Any, *_: Any) -> Any:
        return self._replay("predict_step", item)

    # The end.

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._batches is not None:
            self._batches.end()


def _distributed(trainer: Any, loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """With the sampler that Lightning makes for rank 0 of a DDP strategy."""
    if not trainer._accelerator_connector.use_distributed_sampler or isinstance(
        loader.sampler, DistributedSampler
    ):
        return loader
    stage = RunningStage.TRAINING if trainer.training else trainer.state.stage
    sampler = _get_distributed_sampler(
        loader,
        trainer.training or _is_dataloader_shuffled(loader),
        overfit_batches=trainer.overfit_batches,
        mode=stage,
        num_replicas=ranks,
        rank=0,
    )
    updated: DataLoader[Any] = _update_dataloader(loader, sampler, mode=stage)
    return updated


def _step_name(trainer: Any) -> str:
    return "test_step" if trainer.testing else "predict_step" if trainer.predicting else "validation_step"


def _arguments(step: Callable[..., Any]) -> int:
    """How many of (batch, batch_idx) a step method takes."""
    code = getattr(step, "__func__", step).__code__
    return int(code.co_argcount) - 1

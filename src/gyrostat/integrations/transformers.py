"""Hugging Face's `Trainer` on virtual workers: change the import, and `TrainingArguments` keep their meaning.

    from gyrostat.integrations.transformers import Trainer

`Trainer`'s own loop runs. Where it takes the batches of one optimizer step from its data loader, it gets a `Step`
(`get_batch_samples`), with one stand-in for every further accumulation step; where it runs one batch, the step's micro-batches
run (`_run_step`), each by the `training_step` of the script's class. `accelerator.backward` is `step.backward`. Losses that
are weighted by tokens need the count of all virtual workers before the pass: a survey (`step.survey`).

The state of the loop is tracked like the model (`TrainerProgress`), so that it resumes, and newcomers join, at the right step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from gyrostat.integrations import launch

launch.hide_launcher()

import transformers  # noqa: E402
from transformers import trainer as trainer_module  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from gyrostat.core.errors import Misuse, Refused  # noqa: E402
from gyrostat.data.loader import OrderedLoader  # noqa: E402
from gyrostat.data.rng import Streams  # noqa: E402
from gyrostat.engine.script.job import Job  # noqa: E402
from gyrostat.engine.script.step import AnyStep, Step  # noqa: E402
from gyrostat.integrations.accelerate_state import check_plugins, present, training_loader  # noqa: E402
from gyrostat.integrations.replaced import replaced  # noqa: E402
from gyrostat.integrations.transformers_evaluation import EvaluationBatches  # noqa: E402

_RESUMED = "gyrostat"
"""What the loop gets for `resume_from_checkpoint` where it begins in the middle of an epoch."""


class _Substep:
    """Stands in for an accumulation step before the last, in which all of them run."""


class TrainingSteps:
    """Gives Trainer's loop the steps of the job. It is its data loader: one item is one optimizer step."""

    def __init__(
        self, job: Job, loader: OrderedLoader, *, epochs: int, accumulate: int, dataset: Any
    ) -> None:
        self.job, self.dataset = job, dataset
        self._loader, self._accumulate = loader, accumulate
        self._epochs = iter(job.epochs(epochs))
        self._epoch = next(self._epochs, epochs)
        self._steps: Iterator[AnyStep] = iter(())
        self._first: AnyStep | None = None
        self._seen = 0

    @property
    def first_epoch(self) -> int:
        """The epoch that this process begins with."""
        return self._epoch

    def begin_epoch(self, epoch: int) -> int:
        """Returns how many of its steps are done: those of a job that resumes."""
        if epoch != self._epoch:
            self._epoch = next(self._epochs)
        self._steps = self.job.steps(self._loader, accumulate=self._accumulate)
        self._first = next(self._steps, None)
        self._seen = 0 if self._first is None else self._first.number
        return self._seen

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[AnyStep]:
        return self

    def __next__(self) -> AnyStep:
        if self._first is not None:
            step, self._first = self._first, None
        else:
            step = next(self._steps)
        self._seen = step.number + 1
        return step

    def end_epoch(self) -> None:
        """Trainer has seen every batch of the epoch, or stops in the middle of it."""
        if self._seen == -(-len(self) // self._accumulate):
            next(self._steps, None)
        else:
            _close(self._steps)

    def end(self) -> None:
        """Training is over; a job that had ended before has its last state now."""
        _close(self._steps)
        next(self._epochs, None)
        _close(self._epochs)


def _close(loop: Iterator[Any]) -> None:
    """As a `break` out of it does."""
    if isinstance(loop, Generator):
        loop.close()


class EndOfEpoch(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the loop over steps before Trainer evaluates and saves at the end of an epoch."""

    def on_epoch_end(self, *_: Any, train_dataloader: TrainingSteps, **__: Any) -> None:
        train_dataloader.end_epoch()


class TrainerProgress:
    """What the loop keeps beside model, optimizer and schedule. Tracked, so equal on all workers."""

    _TIMES = ("_runtime", "_per_second", "_preparation_time")

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        history = [
            {key: value for key, value in entry.items() if not key.endswith(self._TIMES)}
            for entry in state.log_history
        ]
        return {
            "epoch": state.epoch,
            "global_step": state.global_step,
            "total_flos": float(state.total_flos),
            "num_input_tokens_seen": state.num_input_tokens_seen,
            "best_metric": state.best_metric,
            "best_global_step": state.best_global_step,
            "best_model_checkpoint": state.best_model_checkpoint,
            "log_history": history,
            "callbacks": {type(each).__name__: each.state() for each in self._exportable()},
            "current_flos": trainer.current_flos,
            "losses": trainer.rank_losses,
            "loss": getattr(trainer, "_tr_loss", torch.zeros(())),
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        for name in ("epoch", "global_step", "total_flos", "num_input_tokens_seen"):
            setattr(state, name, saved[name])
        for name in ("best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(state, name, saved[name])
        state.log_history = list(saved["log_history"])
        for each in self._exportable():
            if (exported := saved["callbacks"].get(type(each).__name__)) is not None:
                vars(each).update({**exported["args"], **exported["attributes"]})
        trainer.current_flos = saved["current_flos"]
        trainer.rank_losses.copy_(saved["losses"])
        trainer._tr_loss = saved["loss"].clone().to(trainer.args.device)
        trainer._total_loss_scalar = saved["total_loss"]
        trainer._globalstep_last_logged = saved["last_logged"]

    def _exportable(self) -> list[Any]:
        trainer = self._trainer
        return [
            each
            for each in [*trainer.callback_handler.callbacks, trainer.control]
            if isinstance(each, ExportableState)
        ]


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Hugging Face's `Trainer`, elastic, with the bits that it has under DDP on N processes."""

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **options: Any) -> None:
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        _check_arguments(args)
        self.job = launch.join(args.seed)
        _ = args.device  # makes Accelerate's state
        present(self.job)
        self.rank_losses = torch.zeros(self.job.virtual_workers)
        super().__init__(model, args, *others, **options)
        check_plugins(self.accelerator.state)
        self._step: AnyStep | None = None
        self._items: Any = None
        self._totals = SimpleNamespace(flos=0.0, tokens=0)
        self._train_loader: Any = None
        # Called by the loop with a step; the methods that they hide are called with micro-batches.
        self.__dict__["training_step"] = self._run_step
        self.accelerator.backward = self._backward
        self.add_callback(EndOfEpoch)

    # The loop of training.

    def train(self, resume_from_checkpoint: Any = None, *others: Any, **options: Any) -> Any:
        if resume_from_checkpoint and self.job.step == 0:
            raise Refused(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: Trainer's checkpoints do not hold all that exact training "
                "goes on from. gyrostat's do: gyrostat run --checkpoint-dir DIR resumes by itself; leave the argument out"
            )
        return super().train(None, *others, **options)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        self._train_loader = dataloader
        return super().set_initial_training_values(args, dataloader)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *others: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *others)
        if self.job.tracked:
            raise Misuse("Trainer.train was called twice in one job; train once per job")
        loader = training_loader(self.job, self._train_loader)
        self._surveys = self.args.gradient_accumulation_steps > 1 and loader.lookahead
        model, _ = super()._prepare_for_training(max_steps, self._train_loader, None)
        self._track(model)
        steps = TrainingSteps(
            self.job,
            loader,
            epochs=num_train_epochs,
            accumulate=self.args.gradient_accumulation_steps,
            dataset=self._train_loader.dataset,
        )
        self.callback_handler.train_dataloader = steps
        self._prepared = model, steps
        return steps.first_epoch, 0

    def _track(self, model: torch.nn.Module) -> None:
        optimizer, schedule = self.optimizer, self.lr_scheduler
        things = {
            "model": model,
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "schedule": schedule,
            "trainer": TrainerProgress(self),
        }
        if getattr(self.accelerator, "scaler", None) is not None:
            things["scaler"] = self.accelerator.scaler
        handler = self.accelerator.ddp_handler
        self.job.track(ddp=handler.to_kwargs(), same_streams=True, **things)
        self.job.between_steps.share_modules()

    def _prepare_for_training(self, *_: Any) -> Any:
        return self._prepared

    def _run_epoch(self, *, epoch: int, train_dataloader: TrainingSteps, **options: Any) -> None:
        done = train_dataloader.begin_epoch(epoch)
        options |= {
            "resume_from_checkpoint": _RESUMED if done else None,
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": done * self.args.gradient_accumulation_steps,
        }
        with replaced(trainer_module, skip_first_batches=lambda loader, _: loader):
            super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **options)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != _RESUMED:
            super()._load_rng_state(checkpoint)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        step = next(epoch_iterator, None)
        present(self.job)
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        if step is None:
            return [], None
        self._items = self._count_items(step, device)
        return [*[_Substep()] * (step.micro_batches - 1), step], None

    def _count_items(self, step: AnyStep, device: torch.device) -> Any:
        """`num_items_in_batch` of each virtual worker; None: the loss does not need it."""
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func is not None or self._surveys):
            return None
        for inputs in step.survey():
            found = self._get_num_items_in_batch([inputs], device)
            counts = self.job.gather(-1 if found is None else int(found))
        of_rank = counts.value.sum(dim=1).float().to(device)
        if (counts.value < 0).any():
            return None
        if self.args.average_tokens_across_devices:
            of_rank = of_rank.sum().expand(len(of_rank))
        return of_rank

    def _run_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run the micro-batches of a step."""
        nothing = torch.zeros((), device=self.args.device)
        if isinstance(inputs, _Substep):
            return nothing
        self._step = inputs
        for batch in inputs:
            flos, tokens = (
                self.job.sum(float(self.floating_point_ops(batch))),
                self.job.sum(self._tokens(batch)),
            )
            items = None if self._items is None else self._items[inputs.virtual_rank]
            losses = self.job.gather(type(self).training_step(self, model, batch, items))
        self._totals = SimpleNamespace(flos=flos.item(), tokens=int(tokens.item()))
        for micro_batch in range(inputs.micro_batches):
            self._add_losses(losses.value[:, micro_batch])
        return nothing  # they are added up in `_tr_loss` already

    def _backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`accelerator.backward`."""
        if self._step is None:
            raise Misuse("accelerator.backward outside training_step; Trainer calls it in every micro-batch")
        options.pop("learning_rate", None)
        scaler = self.accelerator.scaler
        self._step.backward(loss if scaler is None else scaler.scale(loss), **options)

    def _add_losses(self, losses: torch.Tensor) -> None:
        """As the loop does with the loss of its rank."""
        since = 1 + self.state.global_step - self._globalstep_last_logged
        for total, each in ((self._tr_loss, losses[0]), (self.rank_losses, losses)):
            if self.args.logging_nan_inf_filter:
                each = torch.where(torch.isfinite(each), each, total / since)
            total += each.to(total)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *others: Any, **options: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            tr_loss.copy_(self.rank_losses.mean())
            self.rank_losses.zero_()
        super()._maybe_log_save_evaluate(tr_loss, *others, **options)

    def floating_point_ops(self, inputs: Any) -> Any:
        if isinstance(inputs, Step):
            return self._totals.flos
        return 0 if isinstance(inputs, _Substep) else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if isinstance(inputs, Step):
            self.state.num_input_tokens_seen += self._totals.tokens

    def _tokens(self, inputs: Any) -> int:
        """Input tokens of a micro-batch, as Trainer counts them."""
        counted = SimpleNamespace(num_input_tokens_seen=0)
        with replaced(self, state=counted):
            super()._track_num_input_tokens(inputs)
        return int(counted.num_input_tokens_seen)

    def _finalize_training(self, *others: Any) -> Any:
        self._prepared[1].end()
        return super()._finalize_training(*others)

    # Evaluation.

    def _evaluate(self, *others: Any, **options: Any) -> Any:
        if self.job.resuming:  # `eval_on_start` of a job that resumes: done before
            return {}
        return super()._evaluate(*others, **options)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        batches = EvaluationBatches(self, dataloader, loss_only=loss_only, ignore_keys=ignore_keys)
        with replaced(
            self,
            prediction_step=batches.prediction_step,
            gather_function=batches.without_padding,
            preprocess_logits_for_metrics=None,
        ):
            return super().evaluation_loop(batches, description, loss_only, ignore_keys, metric_key_prefix)

    # Logs and files.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if _internal_call:
            self.job.between_steps.barrier()  # the others look for the directory

    def _save_rng_state(self, output_dir: str) -> None:
        """One file per rank, as N processes would write."""
        states = self.job.between_steps.random_states()
        if not self.job.is_main:
            return
        streams = Streams()
        for rank, state in enumerate(states):
            outside = streams.exchange(state)
            with replaced(self.args.distributed_state, process_index=rank):
                super()._save_rng_state(output_dir)
            streams.exchange(outside)

    def log(self, logs: dict[str, float], *others: Any, **options: Any) -> None:
        super().log(logs, *others, **options)
        self.job.log(**{name: value for name, value in logs.items() if isinstance(value, int | float)})


def _check_arguments(args: Any) -> None:
    """Refuse by name what takes DDP's place, or cannot be exact."""
    refused = {
        "deepspeed": "DeepSpeed runs an engine of its own",
        "fsdp": "FSDP shards the model",
        "parallelism_config": "it divides the model among processes",
        "auto_find_batch_size": "the batch size is part of the job",
        "torch_compile": "compiled code is not the code whose bits DDP has been compared with",
    }
    for name, reason in refused.items():
        if getattr(args, name, None):
            raise Refused(f"TrainingArguments({name}={getattr(args, name)!r}): {reason}; leave it out")

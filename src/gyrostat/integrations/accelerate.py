"""Accelerate's `Accelerator` on virtual workers: change the import of a script that has a loop of its own.

    from gyrostat.integrations.accelerate import Accelerator

The script's loop runs once per batch of every virtual worker of this worker. To Accelerate, a virtual worker is what an
accumulation step is: `sync_gradients` is true after the last backward of a step (`feed.py`), and optimizer, schedule and
clipping do nothing before. In evaluation every worker sees all batches of all N processes, so nothing has to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from gyrostat.integrations import launch

launch.hide_launcher()

import accelerate  # noqa: E402
from accelerate.utils import recursively_apply, send_to_device  # noqa: E402

from gyrostat.core.errors import Misuse, NotYet  # noqa: E402
from gyrostat.integrations.accelerate_state import (  # noqa: E402
    check_plugins,
    evaluation_loader,
    present,
    training_loader,
)
from gyrostat.integrations.batches import draw_base_seed  # noqa: E402
from gyrostat.integrations.feed import Feed  # noqa: E402


class PreparedLoader:
    """A data loader that Accelerate has prepared: for training while models are in training mode, else for evaluation."""

    def __init__(self, accelerator: Accelerator, loader: Any) -> None:
        self._accelerator, self._loader = accelerator, loader
        self.dataset, self.batch_sampler = loader.dataset, loader.batch_sampler
        self._training: Any = None

    @property
    def total_batch_size(self) -> int:
        return int(self._loader.total_batch_size)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        if any(model.training for model in accelerator._models):
            return self._train()
        return self._evaluate()

    def _train(self) -> Iterator[Any]:
        accelerator = self._accelerator
        if self._training is None:
            self._training = training_loader(accelerator.job, self._loader)
        accelerator.track()
        for batch, number in accelerator.feed.batches(
            self._training, accelerator.gradient_accumulation_steps
        ):
            present(accelerator.job)
            # Where the virtual worker's last iteration has left it.
            accelerator.gradient_state._set_sync_gradients(number == 0)
            yield send_to_device(batch, accelerator.device)

    def _evaluate(self) -> Iterator[Any]:
        accelerator = self._accelerator
        loader, fresh = evaluation_loader(accelerator.job, self._loader)
        draw_base_seed(accelerator.job, self._loader)
        for number, accelerator.samples in enumerate(fresh):
            yield send_to_device(loader.fetch([number])[1], accelerator.device)
        accelerator.samples = None


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's `Accelerator`, elastic, with the bits that it has under DDP on N processes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.job = launch.join(0)
        self.feed = Feed(self.job)
        self.samples: int | None = None
        """How many samples of the batch that is evaluated have not come before."""
        super().__init__(*args, **options)
        check_plugins(self.state)
        present(self.job)
        self.gradient_state.plugin_kwargs["adjust_scheduler"] = False

    # Setting up.

    def prepare_data_loader(self, data_loader: Any, *others: Any, **options: Any) -> Any:
        made = PreparedLoader(self, super().prepare_data_loader(data_loader, *others, **options))
        self._dataloaders[-1] = made
        return made

    def track(self) -> None:
        """When training begins: hand over everything that was prepared or registered."""
        if self.job.tracked:
            return
        things: dict[str, Any] = {f"model{number}": each for number, each in enumerate(self._models)}
        things |= {f"optimizer{number}": each.optimizer for number, each in enumerate(self._optimizers)}
        things |= {f"schedule{number}": each.scheduler for number, each in enumerate(self._schedulers)}
        things |= {f"registered{number}": each for number, each in enumerate(self._custom_objects)}
        if self.scaler is not None:
            things["scaler"] = self.scaler
        ddp = None if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        self.job.track(ddp=ddp, same_streams=True, **things)
        self.job.between_steps.share_modules()

    # One step.

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss = loss / self.gradient_accumulation_steps
        self.feed.backward(loss if self.scaler is None else self.scaler.scale(loss), **options)
        self.gradient_state._set_sync_gradients(self.feed.complete)

    def accumulate(self, *_: Any) -> Any:
        return nullcontext()

    def clip_grad_norm_(self, *args: Any, **options: Any) -> Any:
        return torch.zeros(()) if self.feed.in_step else super().clip_grad_norm_(*args, **options)

    def clip_grad_value_(self, *args: Any, **options: Any) -> None:
        if not self.feed.in_step:
            super().clip_grad_value_(*args, **options)

    # Values of all processes.

    def gather(self, tensor: Any) -> Any:
        if self.feed.in_step:
            raise Misuse(
                "accelerator.gather between the backwards of one step, where not all virtual workers have run; call "
                "accelerator.job.gather(value) before backward, and read it when accelerator.sync_gradients is true"
            )
        return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        samples = self.samples
        if samples is None:
            return self.gather(input_data)
        if isinstance(input_data, list) and not any(isinstance(each, torch.Tensor) for each in input_data):
            return input_data[:samples]
        return recursively_apply(
            lambda tensor: tensor[:samples] if tensor.dim() else tensor[None], input_data
        )

    def wait_for_everyone(self) -> None:
        self.job.between_steps.barrier()

    # Files.

    def save_state(self, *args: Any, **options: Any) -> Any:
        saved = super().save_state(*args, **options) if self.is_main_process else None
        self.job.between_steps.barrier()
        return saved

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        raise NotYet(
            "accelerator.skip_first_batches: gyrostat's own checkpoints resume where they were taken, also in the middle of an "
            "epoch: gyrostat run --checkpoint-dir DIR"
        )

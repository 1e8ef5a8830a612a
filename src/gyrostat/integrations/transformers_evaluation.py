"""`evaluate` and `predict` of Hugging Face's Trainer: virtual workers predict, and its own evaluation loop reads what they did.

The batches are those of N processes, filled up at the end as Accelerate does; every worker gets the predictions of all of them,
in the order of the dataset, and what fills up is cut off: each sample counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import recursively_apply
from transformers.trainer_pt_utils import find_batch_size

from gyrostat.integrations.accelerate_state import evaluation_loader
from gyrostat.integrations.batches import draw_base_seed
from gyrostat.integrations.replaced import replaced


class EvaluationBatches:
    """Trainer's data loader in an evaluation. Its batches have been predicted when it is iterated."""

    end_of_dataloader = False
    remainder = -1

    def __init__(self, trainer: Any, loader: Any, *, loss_only: bool, ignore_keys: list[str] | None) -> None:
        self._trainer, self._loss_only, self._ignore_keys = trainer, loss_only, ignore_keys
        self.dataset, self._original = loader.dataset, loader
        self._loader, self._fresh = evaluation_loader(trainer.job, loader)
        self._prepare_logits = trainer.preprocess_logits_for_metrics
        self._result: dict[str, Any] = {}
        self._samples = 0

    def __len__(self) -> int:
        return len(self._fresh)

    def __iter__(self) -> Iterator[Any]:
        job, state = self._trainer.job, self._trainer.accelerator.gradient_state
        draw_base_seed(job, self._original)
        items = self._items()
        results = job.evaluate(self._loader, lambda batch: self._predict(batch[0], batch[1], items))
        state._add_dataloader(self)
        try:
            for number, (result, samples) in enumerate(zip(results, self._fresh, strict=True)):
                self._result, self._samples = result, samples
                self.end_of_dataloader = number == len(self) - 1
                yield self._result["inputs"]
        finally:
            state._remove_dataloader(self)

    def _items(self) -> list[Any]:
        """`num_items_in_batch` of every batch: that of the N batches which N processes evaluate at a time."""
        trainer, ranks = self._trainer, self._trainer.job.virtual_workers
        if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
            return []

        def count(batch: tuple[int, Any]) -> float | None:
            found = trainer._get_num_items_in_batch([batch[1]], trainer.args.device)
            return None if found is None else float(found)

        counts = trainer.job.evaluate(self._loader, count)
        if None in counts:
            return []
        if trainer.args.average_tokens_across_devices:
            sums = [sum(counts[first : first + ranks]) for first in range(0, len(counts), ranks)]
            counts = [sums[number // ranks] for number in range(len(counts))]
        return [torch.tensor(each, device=trainer.args.device) for each in counts]

    def _predict(self, number: int, inputs: Any, items: list[Any]) -> dict[str, Any]:
        trainer = self._trainer
        seen = {"samples": torch.empty(find_batch_size(inputs) or 0, 0)}
        name = getattr(trainer.model, "main_input_name", "input_ids")
        if "inputs" in trainer.args.include_for_metrics:
            seen[name] = inputs[name]
        with replaced(trainer, _get_num_items_in_batch=lambda *_: items[number] if items else None):
            loss, logits, labels = type(trainer).prediction_step(
                trainer, trainer.model, inputs, self._loss_only, ignore_keys=self._ignore_keys
            )
        if logits is not None and self._prepare_logits is not None:
            logits = self._prepare_logits(logits, labels)
        return {"inputs": seen, "loss": loss, "logits": logits, "labels": labels}

    def prediction_step(self, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
        """In the place of Trainer's."""
        device, found = self._trainer.args.device, self._result
        on_device = recursively_apply(
            lambda each: each.to(device), [found["loss"], found["logits"], found["labels"]]
        )
        return tuple(on_device)

    def without_padding(self, values: Any, **_: Any) -> Any:
        """In the place of `gather_for_metrics`."""
        return recursively_apply(lambda tensor: tensor[: self._samples], values)

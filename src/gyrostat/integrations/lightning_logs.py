"""`self.log` on virtual workers: the values that all of them log reach Lightning as its DDP strategy would have them.

While a virtual worker runs, calls of `log` are recorded. Afterwards the call is made once per worker: with virtual worker 0's
value or, under `sync_dist`, with the values of all N as one tensor. Lightning adds it up as it adds up a number, and where
DDP would reduce it, `GyrostatStrategy.reduce` does, in the order in which gloo adds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torchmetrics import Metric

from gyrostat.core.errors import NotYet
from gyrostat.integrations.replaced import replaced


@dataclass(frozen=True)
class LogCall:
    """One call of `log`."""

    name: str
    value: torch.Tensor
    options: dict[str, Any]

    def tree(self) -> list[Any]:
        return [self.name, self.value, self.options]

    @classmethod
    def of_tree(cls, tree: Sequence[Any]) -> LogCall:
        return cls(*tree)


class Logs:
    """Records calls of `log`, and makes them."""

    def __init__(self) -> None:
        self.restored: dict[str, Any] = {}
        """Sums of an epoch that another process began, by key."""

    @contextmanager
    def recording(self, module: Any, batch: Any) -> Iterator[list[LogCall]]:
        logged: list[LogCall] = []

        def log(name: str, value: Any, *others: Any, **options: Any) -> None:
            if isinstance(value, Metric) or not isinstance(value, torch.Tensor | int | float):
                raise NotYet(
                    f"self.log({name!r}, …) got a {type(value).__name__}, whose state is not kept per virtual worker; log "
                    "a number or a tensor with one element"
                )
            if others:
                raise NotYet(f"self.log({name!r}, value, …): give its other arguments by name")
            options.setdefault("batch_size", _batch_size(batch))
            logged.append(LogCall(name, torch.as_tensor(value).detach().float().reshape(()).clone(), options))

        with replaced(module, log=log):
            yield logged

    def replay(self, module: Any, stage: str, values: Sequence[tuple[LogCall, torch.Tensor]]) -> None:
        """Make the calls of all micro-batches. `values`: shaped (N, micro-batches), one row per virtual worker."""
        before, module._current_fx_name = module._current_fx_name, stage
        try:
            for call, all_values in values:
                for number in range(all_values.shape[1]):
                    self._log(module, call, all_values[:, number])
        finally:
            module._current_fx_name = before

    def _log(self, module: Any, call: LogCall, values: torch.Tensor) -> None:
        results = module.trainer._results
        synchronised = bool(call.options.get("sync_dist")) and not call.options.get("rank_zero_only")
        if results is None:
            return

        def log(fx: str, name: str, value: Any, **options: Any) -> None:
            if synchronised:
                value, options["sync_dist"] = values.clone(), True
            type(results).log(results, fx, name, value, **options)
            key = f"{fx}.{name}"
            for attribute, sum_ in self.restored.pop(key, {}).items():
                setattr(results[key], attribute, sum_ + getattr(results[key], attribute))

        with replaced(results, log=log):
            type(module).log(module, call.name, values[0], **call.options)


def _batch_size(batch: Any) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return int(extract_batch_size(batch))
        except Exception:  # as Lightning: the user has to say it, if it is needed
            return None


def reduce_in_order(value: Any, ranks: int, operation: str) -> Any:
    """Combine the values of all virtual workers, in the order in which gloo adds numbers. Others are returned as they are."""
    if not isinstance(value, torch.Tensor) or value.shape != (ranks,):
        return value
    operation = operation.lower().rpartition(".")[2]
    if operation in ("max", "min"):
        return getattr(value, operation)()
    total = value[ranks - 1].clone()
    for rank in range(ranks - 2, -1, -1):
        total += value[rank]
    return total / ranks if operation in ("mean", "avg") else total

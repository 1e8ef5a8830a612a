"""What Lightning's loops and callbacks keep beside model, optimizers and schedules. Tracked, so equal on all workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class LightningProgress:
    """The counters of all loops of `fit`, the sums of the epoch's logs, and the state of callbacks."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def state_dict(self) -> dict[str, Any]:
        trainer = self._strategy.trainer
        return {
            "loops": {path: each.state_dict() for path, each in _progresses(trainer.fit_loop)},
            "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "should_stop": trainer.should_stop,
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "logs": self._sums(),
            "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS},
        }

    def _sums(self) -> dict[str, Any]:
        sums = dict(self._strategy._logs.restored)
        for key, metric in self._strategy.trainer.fit_loop.epoch_loop._results.items():
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset:
                names = ("value", "cumulated_batch_size") if metric.meta.is_mean_reduction else ("value",)
                sums[key] = {name: getattr(metric, name) for name in names}
        return sums

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._strategy.trainer
        for path, each in _progresses(trainer.fit_loop):
            each.load_state_dict(saved["loops"][path])
        trainer.fit_loop.epoch_loop._batches_that_stepped = saved["stepped"]
        trainer.should_stop = saved["should_stop"]
        for callback in trainer.callbacks:
            if state := saved["callbacks"].get(callback.state_key):
                callback.load_state_dict(state)
                # ModelCheckpoint leaves out some, when it loads.
                vars(callback).update(
                    {name: value for name, value in state.items() if name in vars(callback)}
                )
        for name, values in saved["metrics"].items():
            setattr(trainer._logger_connector, name, dict(values))
        trainer.fit_loop.epoch_loop._results.clear()
        self._strategy._logs.restored = dict(saved["logs"])


def _progresses(loop: Any, path: str = "fit") -> Iterator[tuple[str, Any]]:
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            yield f"{path}.{name}", value
        elif isinstance(value, _Loop):
            yield from _progresses(value, f"{path}.{name}")

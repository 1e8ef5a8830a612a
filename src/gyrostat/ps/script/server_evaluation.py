"""`job.evaluate` of a job with servers: workers share the micro-batches of a dataset, on one consistent read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gyrostat.data import evaluation
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.rng import Streams, seed_all
from gyrostat.engine.state import statetree
from gyrostat.ps.client.port import ParameterServers
from gyrostat.ps.protocol.evaluation import EvaluationKey
from gyrostat.ps.script.batch_exchange import BatchExchange
from gyrostat.ps.script.dense_part import DensePart
from gyrostat.ps.script.server_loader import stream_seed

_PARTS = 32


class ServerEvaluator:
    """Evaluates parts of a dataset as the leader hands them out."""

    def __init__(
        self,
        servers: ParameterServers,
        exchange: BatchExchange,
        dense: Sequence[DensePart],
        *,
        seed: int,
    ) -> None:
        self._servers, self._exchange, self._dense, self._seed = servers, exchange, dense, seed
        self._epoch, self._number = -1, 0
        self._streams = Streams()

    def epoch_over(self, epoch: int) -> None:
        """Evaluations from now on are of the parameters after this epoch."""
        self._epoch, self._number = epoch, 0

    def run(self, loader: OrderedLoader, fn: Callable[[Any], Any]) -> list[Any]:
        """fn of every micro-batch, in dataset order, on every worker."""
        evaluation.check_evaluable(loader)
        size = loader.batch_size or 1
        items = -(-loader.length // size)
        key = EvaluationKey(self._epoch, self._number)
        self._number += 1
        if key.epoch < 0 and self._servers.progress.updates:
            # The job has begun, and this worker joins it: what others evaluated before is not known any more.
            return list(self._evaluate(loader, fn, range(items), size, key).values())
        results: dict[int, Any] = {}
        while (part := self._servers.evaluate_next(key, items, max(1, items // _PARTS))) is not None:
            found = self._evaluate(loader, fn, part, size, key)
            self._servers.evaluate_report(key, part, statetree.encode(found))
        for payload in self._servers.evaluate_results(key):
            results.update(statetree.decode(payload))
        return [results[item] for item in sorted(results)]

    def _evaluate(
        self, loader: OrderedLoader, fn: Callable[[Any], Any], part: range, size: int, key: EvaluationKey
    ) -> dict[int, Any]:
        wanted = [
            (
                item,
                stream_seed(self._seed, key.epoch, key.number, item),
                list(range(item * size, min((item + 1) * size, loader.length))),
            )
            for item in part
        ]
        modes = {module: module.training for part in self._dense for module in part.module.modules()}
        before = self._streams.save()
        results: dict[int, Any] = {}
        try:
            for dense in self._dense:
                dense.module.eval()
            self._exchange.forget()
            self._exchange.pull_dense()
            with torch.no_grad():
                for (item, seed, _), batch in zip(wanted, evaluation.batches(loader, wanted), strict=True):
                    seed_all(seed)
                    self._exchange.forget()
                    results[item] = fn(batch)
        finally:
            self._exchange.forget()
            for module, mode in modes.items():
                module.training = mode
            self._streams.exchange(before)
        return results

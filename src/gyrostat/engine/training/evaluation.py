"""`job.evaluate`: virtual workers share the micro-batches of a dataset, with the same results on any placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gyrostat.core.progress import Progress
from gyrostat.data import evaluation
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.rng import Streams, seed_all
from gyrostat.engine.state import statetree
from gyrostat.engine.training.buffers import restore_buffers, slots_of
from gyrostat.engine.training.collectives import Collectives
from gyrostat.engine.training.generation import CurrentGeneration


class Evaluator:
    """Evaluates on the local virtual workers and collects the results of all workers."""

    def __init__(
        self,
        generation: CurrentGeneration,
        collectives: Collectives,
        streams: Streams,
        *,
        seed: int,
        share_buffers: Callable[[Mapping[str, nn.Module]], None] = lambda modules: None,
    ) -> None:
        """`share_buffers` gives every worker virtual worker 0's buffers, where they differ between passes."""
        self._generation, self._collectives, self._streams = generation, collectives, streams
        self._seed, self._share_buffers = seed, share_buffers

    def run(
        self,
        loader: OrderedLoader,
        fn: Callable[[Any], Any],
        modules: Mapping[str, nn.Module],
        progress: Progress,
        call: int,
    ) -> list[Any]:
        """fn of every micro-batch of the dataset, each sample once, in dataset order; micro-batch j by virtual rank j mod N.

        Every micro-batch has random streams of its own, so results do not depend on the worker that runs it. Streams, buffers
        and training modes are restored afterwards. `call` numbers the evaluations between two boundaries.
        """
        evaluation.check_evaluable(loader)
        mine: dict[int, Any] = {}

        def run_local() -> bytes:
            """The micro-batches of the local virtual workers that have not run yet."""
            size, ranks = loader.batch_size or 1, self._generation.placement.virtual_workers
            wanted = [
                (
                    j,
                    _evaluation_seed(self._seed, progress.step, call, j),
                    list(range(j * size, min((j + 1) * size, loader.length))),
                )
                for j in range(-(-loader.length // size))
                if j % ranks in self._generation.local_ranks and j not in mine
            ]
            self._evaluate(loader, fn, modules, wanted, mine)
            return statetree.encode(mine)

        results: dict[int, Any] = {}
        for payload in self._collectives.exchange("evaluate", progress, run_local):
            results.update(statetree.decode(payload))
        return [results[j] for j in sorted(results)]

    def _evaluate(
        self,
        loader: OrderedLoader,
        fn: Callable[[Any], Any],
        modules: Mapping[str, nn.Module],
        wanted: Sequence[tuple[int, int, list[int]]],
        results: dict[int, Any],
    ) -> None:
        """Add the results of these micro-batches, each given by number, seed and samples."""
        before = self._streams.save()
        modes = {part: part.training for module in modules.values() for part in module.modules()}
        slots = [slot for module in modules.values() for slot in slots_of(module)]
        saved = [(holder[key], holder[key].detach().clone()) for holder, key in slots]
        self._share_buffers(modules)
        for module in modules.values():
            module.eval()
        try:
            with torch.no_grad():
                for (j, seed, _), batch in zip(wanted, evaluation.batches(loader, wanted), strict=True):
                    seed_all(seed)
                    results[j] = fn(batch)
        finally:
            for part, mode in modes.items():
                part.training = mode
            restore_buffers(slots, saved)
            self._streams.exchange(before)


def _evaluation_seed(*parts: int) -> int:
    """A seed from (seed, step, call, micro-batch) that does not collide by accident (SplitMix64)."""
    mixed = 0
    for part in parts:
        mixed = (mixed + part + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1

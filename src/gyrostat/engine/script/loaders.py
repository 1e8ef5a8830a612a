"""The loaders of a script: numbered in the order in which it makes them, which is the same on all workers."""

from __future__ import annotations

from typing import Any

from gyrostat.core.errors import UsageError
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.options import make_loader
from gyrostat.data.shard_loader import ShardLoader, make_shard_loader
from gyrostat.engine.training.generation import CurrentGeneration


class Loaders:
    """Makes loaders and keeps them by number."""

    def __init__(self, generation: CurrentGeneration, *, seed: int, measured_batch_size: int | None) -> None:
        """`measured_batch_size`: takes the place of the script's, in a job that measures it."""
        self._generation, self._seed, self._batch_size = generation, seed, measured_batch_size
        self._count = 0
        self._generators: dict[int, tuple[Any, int]] = {}  # given to loaders, with the first loader of each
        self.by_number: dict[int, OrderedLoader] = {}

    def dataloader(
        self, dataset: Any, batch_size: Any, others: dict[str, Any], **options: Any
    ) -> OrderedLoader:
        """`job.dataloader`. `others`: options of torch's DataLoader that have no parameter of their own there."""
        number, generator = self._next_number(), others.get("generator")
        _, owner = self._generators.setdefault(id(generator), (generator, number))
        loader = make_loader(
            dataset,
            batch_size=self._effective(batch_size, others),
            virtual_workers=self._generation.placement.virtual_workers,
            others=others,
            number=number,
            generator_owner=owner,
            ranks=self._generation.local_ranks,
            **options,
        )
        self.by_number[number] = loader
        return loader

    def shards(self, dataset: Any, batch_size: Any, others: dict[str, Any], **options: Any) -> ShardLoader:
        """`job.shards`."""
        return make_shard_loader(
            dataset,
            batch_size=self._effective(batch_size, others),
            virtual_workers=self._generation.placement.virtual_workers,
            seed=self._seed,
            others=others,
            number=self._next_number(),
            **options,
        )

    def _effective(self, given: Any, others: dict[str, Any]) -> Any:
        """The script's batch size, unless the job measures another."""
        measured = self._batch_size
        if measured is None:
            return given
        if given is None or others.get("batch_sampler") is not None:
            raise UsageError(
                f"batches of {measured} samples are to be measured, but this loader leaves batches to its dataset or "
                "batch_sampler; give it a batch_size"
            )
        return measured

    def _next_number(self) -> int:
        number, self._count = self._count, self._count + 1
        return number

"""The training data of a job with servers: batches of shards that the leader hands out.

A batch is named (epoch, first position // batch size). Which samples are at its positions, and the random streams under which
it is made and trained, follow from seed, epoch and batch alone: a batch that is trained again is the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from gyrostat.core.errors import NotYet, UsageError
from gyrostat.data.bijection import Bijection
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.rng import seed_all
from gyrostat.data.shard_loader import make_shard_loader
from gyrostat.data.shards.layout import ShardLayout
from gyrostat.ps.client.port import DataSpec
from gyrostat.ps.protocol.delivery import check_batches


@dataclass(frozen=True, kw_only=True)
class ServerLoader(OrderedLoader):
    """A dataset whose shards the leader hands out."""

    data: DataSpec
    ordered_batches: bool
    """Batches are handed out one after the other, in an order of samples that is shuffled as a whole."""

    def samples(self, epoch: int, positions: range) -> list[int]:
        """The samples of a batch."""
        data = self.data
        if not data_shuffles(self):
            return list(positions)
        if self.ordered_batches:
            return _permutation(data.samples, data.seed, epoch).take(positions)
        layout = ShardLayout.of_indices(data.samples, data.shard_size)
        shard = layout.shard_of(positions.start)
        first, last = layout.bounds(shard)
        order = _permutation(last - first, data.seed, epoch, shard)
        return [first + place for place in order.take(range(positions.start - first, positions.stop - first))]

    def batch(self, epoch: int, number: int, samples: list[int]) -> Any:
        """Make a batch. The random streams of this process are those of the batch from now on."""
        seed_all(stream_seed(self.data.seed, epoch, number))
        return self.fetch(samples)


def data_shuffles(loader: ServerLoader) -> bool:
    return bool(loader.shuffle)


def make_server_loader(
    dataset: Any,
    batch_size: Any,
    others: dict[str, Any],
    *,
    seed: int,
    ordered: bool,
    shard_size: int,
    shuffle: bool,
    **options: Any,
) -> ServerLoader:
    """Check the user's options and make the loader."""
    if not isinstance(batch_size, int):
        raise UsageError(
            f"batch_size={batch_size!r}: with servers all batches have one size; give a whole number"
        )
    if options["num_workers"]:
        raise NotYet(
            f"job.shards(num_workers={options['num_workers']}) with servers: batches are made in the worker; use more workers"
        )
    if options["drop_last"]:
        raise UsageError(
            "job.shards(drop_last=True) with servers: every sample is trained once; leave it out"
        )
    check_batches(shard_size, batch_size)
    plain = make_shard_loader(
        dataset,
        batch_size=batch_size,
        shard_size=shard_size,
        virtual_workers=1,
        seed=seed,
        shuffle=shuffle,
        others=others,
        **options,
    )
    if plain.length == 0:
        raise UsageError("job.shards: the dataset is empty")
    data = DataSpec(
        samples=plain.length,
        batch_size=batch_size,
        shard_size=batch_size if ordered else shard_size,
        seed=seed,
        shuffle=shuffle and not ordered,
    )
    fields = {name: getattr(plain, name) for name in OrderedLoader.__dataclass_fields__}
    return ServerLoader(**fields, data=data, ordered_batches=ordered)


def stream_seed(*parts: int) -> int:
    """A seed of 63 bits."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


@lru_cache(maxsize=16)
def _permutation(length: int, *key: int) -> Bijection:
    return Bijection(length, *key)


def tensors_of(batch: Any) -> Iterator[Any]:
    """All leaves of a batch of any structure, in a fixed order."""
    if isinstance(batch, dict):
        for key in batch:
            yield from tensors_of(batch[key])
    elif isinstance(batch, tuple | list):
        for each in batch:
            yield from tensors_of(each)
    else:
        yield batch

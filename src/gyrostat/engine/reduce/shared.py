"""Sums over workers of one machine, which see one another's gradients: nobody sends any.

1. Each worker tells the others where its gradients lie, and hears where theirs do.
2. It adds its share of the elements over all virtual workers, in the order that is wanted, into its own total.
3. When all have done so, it copies the other shares from their totals.

Nobody's gradients are written again while another reads them: that happens in the next pass, and a worker ends this one only
when all others have said that they have completed step 2. Totals alternate: one is written again in the pass after the next,
for which the others tell where their gradients lie when they have copied what they need of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from gyrostat.core.errors import PeerLost
from gyrostat.core.placement import Segment
from gyrostat.engine.reduce.buckets import FlatBuckets
from gyrostat.engine.reduce.ring import Bucket, add_home
from gyrostat.engine.reduce.tree_exchange import tree_sum
from gyrostat.engine.reduce.tree_order import Node
from gyrostat.engine.transport.shared_memory import Region, SharedMemoryTransport


class Parts(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker's gradients lie for one bucket."""

    bucket: int
    held: list[tuple[Node, int]]
    """Sums over these virtual workers, in the region of this serial number."""
    total: int


_DONE = b"done"
_decoder = msgspec.msgpack.Decoder(Parts)


def share_in_ddp_order(
    shared_memory: SharedMemoryTransport,
    held: Mapping[int, FlatBuckets],
    total: FlatBuckets,
    bucket: int,
    ranks: int,
) -> None:
    """Each worker completes some of gloo's chunks."""
    workers = len(shared_memory.views) + 1
    whole = Bucket.of({}, total.flats[bucket], ranks)
    homes = [Segment(w, ranks * w // workers, ranks * (w + 1) // workers) for w in range(workers)]

    def add(parts: Mapping[Node, torch.Tensor]) -> None:
        gradients = {node[0]: flat for node, flat in parts.items()}
        add_home(Bucket(gradients, whole.total, whole.chunks), homes[shared_memory.rank], ranks)

    shares = [slice(*whole.range(home.start, home.stop)) for home in homes]
    _share(
        shared_memory, {(rank, rank + 1): flats for rank, flats in held.items()}, total, bucket, shares, add
    )


def share_along_tree(
    shared_memory: SharedMemoryTransport,
    held: Mapping[Node, FlatBuckets],
    total: FlatBuckets,
    bucket: int,
    ranks: int,
) -> None:
    """Each worker adds as many elements."""
    workers, elements = len(shared_memory.views) + 1, total.flats[bucket].numel()
    shares = [slice(elements * w // workers, elements * (w + 1) // workers) for w in range(workers)]
    mine = shares[shared_memory.rank]

    def add(parts: Mapping[Node, torch.Tensor]) -> None:
        mine_of = {node: flat[mine] for node, flat in parts.items()}
        tree_sum(mine_of, (0, ranks), total.flats[bucket][mine])

    _share(shared_memory, held, total, bucket, shares, add)


def _share(
    shared_memory: SharedMemoryTransport,
    held: Mapping[Node, FlatBuckets],
    total: FlatBuckets,
    bucket: int,
    shares: Sequence[slice],
    add: Callable[[Mapping[Node, torch.Tensor]], None],
) -> None:
    regions = {node: _region(flats) for node, flats in held.items()}
    told = Parts(bucket, [(node, region.serial) for node, region in regions.items()], _region(total).serial)
    heard = shared_memory.show([*regions.values(), _region(total)], msgspec.msgpack.encode(told))
    parts = {node: flats.flats[bucket] for node, flats in held.items()}
    totals: dict[int, torch.Tensor] = {}
    for worker, message in heard.items():
        theirs = _decoder.decode(message)
        if theirs.bucket != bucket:
            raise PeerLost(f"worker {worker} has given up bucket {bucket}: another worker is lost")
        for node, serial in theirs.held:
            parts[node] = total.within(shared_memory.memory(worker, serial), bucket)
        totals[worker] = total.within(shared_memory.memory(worker, theirs.total), bucket)
    if shares[shared_memory.rank].stop > shares[shared_memory.rank].start:
        add(parts)
    if any(answer != _DONE for answer in shared_memory.show((), _DONE).values()):
        raise PeerLost(f"another worker has given up bucket {bucket}, for one is lost")
    for worker, theirs_total in totals.items():
        share = shares[worker]
        total.flats[bucket][share].copy_(theirs_total[share])


def _region(flats: FlatBuckets) -> Region:
    assert flats.region is not None
    return flats.region

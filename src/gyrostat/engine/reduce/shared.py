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
from gyrostat.engine.neighbours import Neighbours, Region
from gyrostat.engine.reduce.buckets import FlatBuckets
from gyrostat.engine.reduce.ring import Bucket, add_home
from gyrostat.engine.reduce.tree_exchange import tree_sum
from gyrostat.engine.reduce.tree_order import Node


class Parts(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker's gradients lie for one bucket."""

    bucket: int
    held: list[tuple[Node, int]]
    """Sums over these virtual workers, in the region of this serial number."""
    total: int


_DONE = b"done"
_decoder = msgspec.msgpack.Decoder(Parts)


def share_in_ddp_order(
    neighbours: Neighbours, held: Mapping[int, FlatBuckets], total: FlatBuckets, bucket: int, ranks: int
) -> None:
    """Each worker completes some of gloo's chunks."""
    workers = len(neighbours.views) + 1
    whole = Bucket.of({}, total.flats[bucket], ranks)
    homes = [Segment(w, ranks * w // workers, ranks * (w + 1) // workers) for w in range(workers)]

    def add(parts: Mapping[Node, torch.Tensor]) -> None:
        gradients = {node[0]: flat for node, flat in parts.items()}
        add_home(Bucket(gradients, whole.total, whole.chunks), homes[neighbours.rank], ranks)

    shares = [slice(*whole.range(home.start, home.stop)) for home in homes]
    _share(neighbours, {(rank, rank + 1): flats for rank, flats in held.items()}, total, bucket, shares, add)


def share_along_tree(
    neighbours: Neighbours, held: Mapping[Node, FlatBuckets], total: FlatBuckets, bucket: int, ranks: int
) -> None:
    """Each worker adds as many elements."""
    workers, elements = len(neighbours.views) + 1, total.flats[bucket].numel()
    shares = [slice(elements * w // workers, elements * (w + 1) // workers) for w in range(workers)]
    mine = shares[neighbours.rank]

    def add(parts: Mapping[Node, torch.Tensor]) -> None:
        mine_of = {node: flat[mine] for node, flat in parts.items()}
        tree_sum(mine_of, (0, ranks), total.flats[bucket][mine])

    _share(neighbours, held, total, bucket, shares, add)


def _share(
    neighbours: Neighbours,
    held: Mapping[Node, FlatBuckets],
    total: FlatBuckets,
    bucket: int,
    shares: Sequence[slice],
    add: Callable[[Mapping[Node, torch.Tensor]], None],
) -> None:
    regions = {node: _region(flats) for node, flats in held.items()}
    told = Parts(bucket, [(node, region.serial) for node, region in regions.items()], _region(total).serial)
    heard = neighbours.show([*regions.values(), _region(total)], msgspec.msgpack.encode(told))
    parts = {node: flats.flats[bucket] for node, flats in held.items()}
    totals: dict[int, torch.Tensor] = {}
    for worker, message in heard.items():
        theirs = _decoder.decode(message)
        if theirs.bucket != bucket:
            raise PeerLost(f"worker {worker} has given up bucket {bucket}: another worker is lost")
        for node, serial in theirs.held:
            parts[node] = total.within(neighbours.memory(worker, serial), bucket)
        totals[worker] = total.within(neighbours.memory(worker, theirs.total), bucket)
    if shares[neighbours.rank].stop > shares[neighbours.rank].start:
        add(parts)
    if any(answer != _DONE for answer in neighbours.show((), _DONE).values()):
        raise PeerLost(f"another worker has given up bucket {bucket}, for one is lost")
    for worker, theirs_total in totals.items():
        share = shares[worker]
        total.flats[bucket][share].copy_(theirs_total[share])


def _region(flats: FlatBuckets) -> Region:
    assert flats.region is not None
    return flats.region

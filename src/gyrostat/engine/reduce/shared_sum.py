"""Sums over workers of one machine, which read one another's gradients from shared memory: no gradient is sent.

1. Each worker sends the others the regions that hold its gradients, and receives theirs.
2. It adds its share of the elements over all virtual workers, in the job's order, into its own total.
3. When all have done so, it copies the other shares from their totals.

Gradients are not overwritten while a peer reads them: that happens in the next pass, and a worker ends this pass only when
all others have announced the end of step 2. Totals alternate: one is overwritten in the pass after the next, which begins
with step 1 of peers that have copied what they need of this one.

All functions run in the reducer's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from gyrostat.core.errors import PeerLost
from gyrostat.core.placement import Segment
from gyrostat.engine.reduce.buckets import FlatBuckets
from gyrostat.engine.reduce.ring import Bucket, sum_chunks
from gyrostat.engine.reduce.tree_exchange import tree_sum
from gyrostat.engine.reduce.tree_order import Node
from gyrostat.engine.transport.shared_memory import SharedMemoryTransport
from gyrostat.engine.transport.shared_region import SharedRegion


class BucketLocation(msgspec.Struct, frozen=True, array_like=True):
    """The regions that hold a worker's gradients and total for one bucket, by serial number."""

    bucket: int
    held: list[tuple[Node, int]]
    """Sums over these virtual workers."""
    total: int


_DONE = b"done"
_decoder = msgspec.msgpack.Decoder(BucketLocation)


def sum_in_ddp_order(
    transport: SharedMemoryTransport,
    held: Mapping[int, FlatBuckets],
    total: FlatBuckets,
    bucket: int,
    ranks: int,
) -> None:
    """Sum one bucket in gloo's order. Each worker completes some of gloo's chunks."""
    workers = transport.workers
    whole = Bucket.of({}, total.flats[bucket], ranks)
    homes = [Segment(w, ranks * w // workers, ranks * (w + 1) // workers) for w in range(workers)]

    def add(parts: Mapping[Node, torch.Tensor]) -> None:
        gradients = {node[0]: flat for node, flat in parts.items()}
        sum_chunks(Bucket(gradients, whole.total, whole.chunks), homes[transport.rank], ranks)

    shares = [slice(*whole.range(home.start, home.stop)) for home in homes]
    leaves = {(rank, rank + 1): flats for rank, flats in held.items()}
    _sum(transport, leaves, total, bucket, shares, add)


def sum_along_tree(
    transport: SharedMemoryTransport,
    held: Mapping[Node, FlatBuckets],
    total: FlatBuckets,
    bucket: int,
    ranks: int,
) -> None:
    """Sum one bucket along the tree. Each worker adds an equal share of the elements."""
    workers, elements = transport.workers, total.flats[bucket].numel()
    shares = [slice(elements * w // workers, elements * (w + 1) // workers) for w in range(workers)]
    mine = shares[transport.rank]

    def add(parts: Mapping[Node, torch.Tensor]) -> None:
        mine_of = {node: flat[mine] for node, flat in parts.items()}
        tree_sum(mine_of, (0, ranks), total.flats[bucket][mine])

    _sum(transport, held, total, bucket, shares, add)


def _sum(
    transport: SharedMemoryTransport,
    held: Mapping[Node, FlatBuckets],
    total: FlatBuckets,
    bucket: int,
    shares: Sequence[slice],
    add: Callable[[Mapping[Node, torch.Tensor]], None],
) -> None:
    """Steps 1 to 3. `add` adds this worker's share."""
    regions = {node: _region(flats) for node, flats in held.items()}
    serials = [(node, region.serial) for node, region in regions.items()]
    mine = BucketLocation(bucket, serials, _region(total).serial)
    received = transport.exchange([*regions.values(), _region(total)], msgspec.msgpack.encode(mine))
    parts = {node: flats.flats[bucket] for node, flats in held.items()}
    totals: dict[int, torch.Tensor] = {}
    for worker, message in received.items():
        theirs = _decoder.decode(message)
        if theirs.bucket != bucket:
            raise PeerLost(f"worker {worker} has abandoned bucket {bucket}: another worker is lost")
        for node, serial in theirs.held:
            parts[node] = total.within(transport.peer_memory(worker, serial), bucket)
        totals[worker] = total.within(transport.peer_memory(worker, theirs.total), bucket)
    if shares[transport.rank].stop > shares[transport.rank].start:
        add(parts)
    if any(reply != _DONE for reply in transport.exchange((), _DONE).values()):
        raise PeerLost(f"another worker has abandoned bucket {bucket}, because a worker is lost")
    for worker, theirs_total in totals.items():
        share = shares[worker]
        total.flats[bucket][share].copy_(theirs_total[share])


def _region(flats: FlatBuckets) -> SharedRegion:
    assert flats.region is not None
    return flats.region

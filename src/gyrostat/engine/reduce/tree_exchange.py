"""Adds the subtrees that the workers hold, so that every worker has the sum over all virtual workers.

Every worker is responsible for a share of the elements:

1. It receives that share of all subtrees' sums.
2. It adds them along the tree.
3. It sends the result to all others.

There are two implementations, which send the same bytes and add in the same order. `point_to_point` is faster over gloo.
`by_collectives` is for NCCL, whose point-to-point messages wait for each other; it uses only collectives that gloo has too,
and tests run it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from gyrostat.engine.reduce.tree_order import Node, split
from gyrostat.engine.transport.group import WorkerGroup

_TAG_TOTAL = 0
_TAG_SUM = 1


def exchange_sum(
    sums: Mapping[Node, torch.Tensor],
    nodes: Sequence[Sequence[Node]],
    total: torch.Tensor,
    group: WorkerGroup,
) -> None:
    """Fill `total` on all workers. `sums`: the subtrees of this worker. `nodes`: those of every worker, by rank."""
    exchange = by_collectives if group.by_collectives else point_to_point
    if total.device == group.gradients_on:
        exchange(sums, nodes, total, group)
    else:
        staged = {node: flat.to(group.gradients_on, non_blocking=True) for node, flat in sums.items()}
        there = torch.empty_like(total, device=group.gradients_on)
        exchange(staged, nodes, there, group)
        total.copy_(there, non_blocking=True)


def point_to_point(
    sums: Mapping[Node, torch.Tensor],
    nodes: Sequence[Sequence[Node]],
    total: torch.Tensor,
    group: WorkerGroup,
) -> None:
    """A message for every subtree and worker."""
    cuts = [total.numel() * worker // group.size for worker in range(group.size + 1)]
    shares = [slice(start, stop) for start, stop in pairwise(cuts)]
    mine = shares[group.rank]
    others = [worker for worker in range(group.size) if worker != group.rank]
    sending = [
        group.send(sums[node][shares[worker]], worker, _TAG_SUM + number)
        for worker in others
        for number, node in enumerate(nodes[group.rank])
    ]
    parts = {node: tensor[mine] for node, tensor in sums.items()}
    receiving = []
    for worker in others:
        for number, node in enumerate(nodes[worker]):
            parts[node] = torch.empty(mine.stop - mine.start, dtype=total.dtype)
            receiving.append(group.receive(parts[node], worker, _TAG_SUM + number))
    for transfer in receiving:
        transfer.wait()
    tree_sum(parts, _root(nodes), total[mine])
    sending += [group.send(total[mine], worker, _TAG_TOTAL) for worker in others]
    for transfer in [group.receive(total[shares[worker]], worker, _TAG_TOTAL) for worker in others]:
        transfer.wait()
    for transfer in sending:
        transfer.wait()


def by_collectives(
    sums: Mapping[Node, torch.Tensor],
    nodes: Sequence[Sequence[Node]],
    total: torch.Tensor,
    group: WorkerGroup,
) -> None:
    """An all-to-all for all workers' first subtrees, one for their second …, then an all-gather."""
    share = -(-total.numel() // group.size)
    shares = [min(share, max(0, total.numel() - worker * share)) for worker in range(group.size)]
    parts: dict[Node, torch.Tensor] = {}
    for number in range(max(len(held) for held in nodes)):
        senders = {worker: held[number] for worker, held in enumerate(nodes) if number < len(held)}
        splits = [shares[group.rank] if worker in senders else 0 for worker in range(group.size)]
        received = total.new_empty(sum(splits))
        if group.rank in senders:
            group.all_to_all(received, sums[senders[group.rank]], splits, shares).wait()
        else:
            group.all_to_all(received, total[:0], splits, [0] * group.size).wait()
        for worker, part in enumerate(torch.split(received, splits)):
            if worker in senders:
                parts[senders[worker]] = part
    mine = total.new_empty(share)
    tree_sum(parts, _root(nodes), mine[: shares[group.rank]])
    everyone = total if total.numel() == share * group.size else total.new_empty(share * group.size)
    group.all_gather(everyone, mine).wait()
    if everyone is not total:
        total.copy_(everyone[: total.numel()])


def _root(nodes: Sequence[Sequence[Node]]) -> Node:
    return 0, max(stop for held in nodes for _, stop in held)


def tree_sum(sums: Mapping[Node, torch.Tensor], node: Node, into: torch.Tensor) -> None:
    """Add the sums of subtrees that cover `node`, along the tree."""
    into.copy_(sums[node]) if node in sums else torch.add(*_halves(sums, node), out=into)


def _halves(sums: Mapping[Node, torch.Tensor], node: Node) -> tuple[torch.Tensor, torch.Tensor]:
    middle = split(node)
    return _value(sums, (node[0], middle)), _value(sums, (middle, node[1]))


def _value(sums: Mapping[Node, torch.Tensor], node: Node) -> torch.Tensor:
    return sums[node] if node in sums else torch.add(*_halves(sums, node))

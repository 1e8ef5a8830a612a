"""The fixed binary tree over virtual ranks. Pure arithmetic.

The root covers 0 … N-1. A node of more than one rank is split so that its left half is the largest power of two that leaves
something to the right. Gradients are added along this tree only, so the placement of ranks does not matter: a worker adds
the largest subtrees that it holds entirely, and only their sums are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

Node = tuple[int, int]
"""The ranks start … stop-1."""


def split(node: Node) -> int:
    """The first rank of the right half."""
    start, stop = node
    left = 1 << ((stop - start - 1).bit_length() - 1)
    return start + left


def maximal_nodes(ranks: int, held: Sequence[int]) -> list[Node]:
    """The largest nodes of the tree over `ranks` ranks that lie entirely within `held`, in order."""
    return list(_maximal((0, ranks), frozenset(held)))


def _maximal(node: Node, held: frozenset[int]) -> Iterator[Node]:
    start, stop = node
    if all(rank in held for rank in range(start, stop)):
        yield node
    elif stop - start > 1:
        middle = split(node)
        yield from _maximal((start, middle), held)
        yield from _maximal((middle, stop), held)


@cache
def siblings(ranks: int) -> frozenset[tuple[Node, Node]]:
    """All pairs of nodes that the tree adds to each other."""
    return frozenset(_siblings((0, ranks)))


def _siblings(node: Node) -> Iterable[tuple[Node, Node]]:
    start, stop = node
    if stop - start > 1:
        middle = split(node)
        yield (start, middle), (middle, stop)
        yield from _siblings((start, middle))
        yield from _siblings((middle, stop))

"""How gloo's all-reduce cuts a tensor into N chunks. Pure arithmetic.

gloo (the algorithm that torch's ProcessGroupGloo uses, checked by `selftest.py`) cuts the tensor into segments of at most
1 MiB, at least two per rank, and gives each rank an equal run of them: its chunk. Chunk c is sent round the ring and
added as ((a[c-1] + a[c-2]) + a[c-3]) + … + a[c], indices modulo N.
"""

from __future__ import annotations

_SEGMENT_BYTES = 1 << 20


def chunks(elements: int, element_size: int, ranks: int) -> list[tuple[int, int]]:
    """The element range of each of the `ranks` chunks. The last ones may be short or empty."""
    size = elements * element_size
    cap = element_size * max(1, _SEGMENT_BYTES // element_size)
    segments = _round_up(max(-(-size // cap), 2 * ranks), ranks)
    segment_bytes = _round_up(-(-size // segments), element_size)
    each = (segments // ranks) * segment_bytes // element_size
    return [(min(c * each, elements), min((c + 1) * each, elements)) for c in range(ranks)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

"""Hugging Face's Trainer on gyrostat: samples/s against its own DDP on two processes, and against its own accumulation.

Both sides stay alive and take turns in blocks of steps; one thread per process.
"""

from __future__ import annotations

from collections.abc import Iterator

from figures import Figure, Options, main
from framework_sides import compare_framework


def measure(options: Options) -> Iterator[Figure]:
    yield from compare_framework("transformers", options)


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=10)

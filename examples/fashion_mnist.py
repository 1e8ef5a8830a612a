"""Fashion-MNIST as Debian packages it: 28×28 grey images of ten kinds of clothes, 70,000 in all."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DIRECTORY = Path("/usr/share/datasets/fashion-mnist")


def load(split: str, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` images of "train" or "test", N×1×28×28 scaled to -1 … 1, and their classes.

    The files are in no particular order of classes, so the first ones are a fair sample.
    """
    prefix = {"train": "train", "test": "t10k"}[split]
    images = _read_idx(DIRECTORY / f"{prefix}-images-idx3-ubyte.gz", magic=0x803, count=count)
    labels = _read_idx(DIRECTORY / f"{prefix}-labels-idx1-ubyte.gz", magic=0x801, count=count)
    return images.unsqueeze(1).float() / 127.5 - 1, labels.long()


def _read_idx(path: Path, *, magic: int, count: int) -> Tensor:
    """The first `count` entries of an idx file: a magic number, a length per dimension, then the bytes."""
    if not path.exists():
        raise SystemExit(f"{path} is missing; install the data with: apt-get install dataset-fashion-mnist")
    with gzip.open(path) as file:
        found = int.from_bytes(file.read(4), "big")
        if found != magic:
            raise SystemExit(
                f"{path} starts with {found:#x}, not {magic:#x}; reinstall dataset-fashion-mnist"
            )
        dimensions = found & 0xFF
        length, *shape = (int.from_bytes(file.read(4), "big") for _ in range(dimensions))
        count = min(count, length)
        data = file.read(count * int(np.prod(shape, dtype=np.int64)))
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(count, *shape).copy())

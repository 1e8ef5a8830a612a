"""Shards in a plain NumPy loop: softmax regression that can be killed at any instant and goes on where it was. No torch.

    python examples/shards_numpy.py --directory run      # kill it, start it again: every sample still counts once

The data are 4,096 points of ten noisy clusters, read shard by shard. `seen` is part of the model's state and counts how often
each sample went into it; the program checks it at the end. The digest is that of a run that was never killed.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gyrostat

SEED = 7
SAMPLES, FEATURES, CLASSES = 4096, 16, 10
Params = dict[str, Any]
"""Arrays by name."""


def clusters() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Points around ten random centres, sorted by class: whoever trains in this order learns only the last one."""
    random = np.random.default_rng(SEED)
    labels = np.sort(random.integers(CLASSES, size=SAMPLES))
    centres = random.normal(size=(CLASSES, FEATURES))
    return centres[labels] + 0.8 * random.normal(size=(SAMPLES, FEATURES)), labels


def update(params: Params, x: NDArray[np.float64], y: NDArray[np.int64], rate: float) -> float:
    """One step of gradient descent, in place; the loss before it."""
    scores = x @ params["weights"] + params["bias"]
    scores -= scores.max(axis=1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=1, keepdims=True)
    loss = -float(np.log(shares[np.arange(len(y)), y]).mean())
    shares[np.arange(len(y)), y] -= 1
    params["weights"] -= rate * x.T @ shares / len(y)
    params["bias"] -= rate * shares.mean(axis=0)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--shard-size", type=int, default=64)
    parser.add_argument("--directory", type=Path, default=None, help="where to save; without it, nothing is")
    parser.add_argument("--save-every", type=int, default=50, metavar="BATCHES")
    args = parser.parse_args()

    x, y = clusters()
    params: Params = {
        "weights": np.zeros((FEATURES, CLASSES)),
        "bias": np.zeros(CLASSES),
        "seen": np.zeros(SAMPLES, dtype=np.int64),
    }
    source = gyrostat.shards(
        SAMPLES, shard_size=args.shard_size, epochs=args.epochs, seed=SEED, directory=args.directory
    )
    if source.resumed_from is not None:
        params = dict(np.load(source.resumed_from / "params.npz"))
        print(f"resumed at step {source.step}", flush=True)

    def write(directory: Path) -> None:
        np.savez(directory / "params.npz", **params)

    for shard in source:
        for batch in shard.batches(args.batch_size):
            loss = update(params, x[batch.start : batch.stop], y[batch.start : batch.stop], rate=0.1)
            params["seen"][batch.start : batch.stop] += 1
            saves = args.directory is not None and (source.step + 1) % args.save_every == 0
            gyrostat.batch_end(save=write if saves else None)
            print(f"step {source.step} epoch {shard.epoch} loss {loss:.4f}", flush=True)

    if args.directory is not None:
        source.save(write)
    assert (params["seen"] == args.epochs).all(), "every sample once per epoch"
    right = (np.argmax(x @ params["weights"] + params["bias"], axis=1) == y).mean()
    digest = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).hexdigest()
    print(f"every sample exactly {args.epochs} times; {right:.1%} right; digest {digest[:16]}")


if __name__ == "__main__":
    main()

"""Shards in a JAX loop: a small network, its optimizer state and the shard queues saved as one. No torch.

    pip install gyrostat[jax]
    python examples/shards_jax.py --directory run        # kill it, start it again: every sample still counts once

`shards_numpy.py` is the same in the small. Here the state is a tree of JAX arrays, of which `jax.tree_util` makes a list for
`numpy.savez`. The shard size is a multiple of the batch size, so that all batches have one shape and `jit` compiles once.
"""

from __future__ import annotations

import argparse
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gyrostat

SEED = 7
SAMPLES, BATCH_SIZE, SHARD_SIZE = 2048, 32, 128
State = dict[str, Any]


def spirals() -> tuple[jax.Array, jax.Array]:
    """Two spirals around each other, one after the other."""
    random = np.random.default_rng(SEED)
    turn = random.uniform(0.5, 2.5, size=SAMPLES) * np.pi
    label = np.arange(SAMPLES) * 2 // SAMPLES
    side = np.where(label == 1, 1.0, -1.0)[:, None]
    points = side * np.stack([np.cos(turn), np.sin(turn)], axis=1) * turn[:, None] / 8
    noisy = points + 0.02 * random.normal(size=points.shape)
    return jnp.asarray(noisy, jnp.float32), jnp.asarray(label, jnp.float32)


def initial_state() -> State:
    keys = jax.random.split(jax.random.key(SEED), 3)
    sizes = (2, 32, 32, 1)
    layers = [
        {"w": jax.random.normal(key, (i, o)) * np.sqrt(2.0 / i), "b": jnp.zeros(o)}
        for key, i, o in zip(keys, sizes, sizes[1:], strict=False)
    ]
    momentum = jax.tree_util.tree_map(jnp.zeros_like, layers)
    return {"layers": layers, "momentum": momentum, "seen": jnp.zeros(SAMPLES, jnp.int32)}


def scores(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return (x @ layers[-1]["w"] + layers[-1]["b"])[:, 0]


def loss_of(layers: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    score = scores(layers, x)
    return jnp.mean(jax.nn.softplus(score) - y * score)


@partial(jax.jit, static_argnames="size")
def update(state: State, x: jax.Array, y: jax.Array, start: int, size: int) -> tuple[State, jax.Array]:
    """One step with momentum on samples start … start+size-1."""
    x, y = (jax.lax.dynamic_slice_in_dim(data, start, size) for data in (x, y))
    loss, gradients = jax.value_and_grad(loss_of)(state["layers"], x, y)
    momentum = jax.tree_util.tree_map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    layers = jax.tree_util.tree_map(lambda p, m: p - 0.05 * m, state["layers"], momentum)
    counted = jax.lax.dynamic_slice_in_dim(state["seen"], start, size) + 1
    seen = jax.lax.dynamic_update_slice_in_dim(state["seen"], counted, start, 0)
    return {"layers": layers, "momentum": momentum, "seen": seen}, loss


def write(state: State, directory: Path) -> None:
    leaves = jax.tree_util.tree_leaves(state)
    np.savez(directory / "state.npz", *(np.asarray(leaf) for leaf in leaves))


def read(like: State, directory: Path) -> State:
    saved = np.load(directory / "state.npz")
    leaves = [jnp.asarray(saved[name]) for name in saved.files]
    state: State = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=None, help="where to save; without it, nothing is")
    parser.add_argument("--save-every", type=int, default=50, metavar="BATCHES")
    args = parser.parse_args()

    x, y = spirals()
    state = initial_state()
    source = gyrostat.shards(
        SAMPLES, shard_size=SHARD_SIZE, epochs=args.epochs, seed=SEED, directory=args.directory
    )
    if source.resumed_from is not None:
        state = read(state, source.resumed_from)
        print(f"resumed at step {source.step}", flush=True)

    for shard in source:
        for batch in shard.batches(BATCH_SIZE):
            state, loss = update(state, x, y, batch.start, len(batch))
            saves = args.directory is not None and (source.step + 1) % args.save_every == 0
            gyrostat.batch_end(save=partial(write, state) if saves else None)
            print(f"step {source.step} epoch {shard.epoch} loss {loss:.4f}", flush=True)

    if args.directory is not None:
        source.save(partial(write, state))
    assert (state["seen"] == args.epochs).all(), "every sample once per epoch"
    right = float(((scores(state["layers"], x) > 0) == y).mean())
    leaves = jax.tree_util.tree_leaves(state)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    print(f"every sample exactly {args.epochs} times; {right:.1%} right; digest {digest[:16]}")


if __name__ == "__main__":
    main()

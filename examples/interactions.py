"""Who took what: interactions drawn from a latent model, so that the right answer is known.

Every user u has a taste p_u and every item i a character q_i, both vectors of `FACTORS` independent
standard normals; every item also has a popularity b_i, normal with mean 0 and deviation 1. A user takes
`TAKEN` different items one after the other, each with probability proportional to

    exp(SHARPNESS * p_u · q_i / sqrt(FACTORS) + b_i)

among those not taken yet (Gumbel's trick: add Gumbel noise to the exponent, take the largest).
`HELD_OUT` of a user's items, chosen at random, are not trained on: a recommender is asked to find them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FACTORS = 8
SHARPNESS = 3.0
TAKEN = 40
HELD_OUT = 5


@dataclass(frozen=True, kw_only=True)
class Interactions:
    train: Tensor
    """One row (user, item) per interaction to train on."""
    held_out: Tensor
    """User × `HELD_OUT`: the items to find."""
    seen: Tensor
    """User × item: whether it is in `train`."""
    affinity: Tensor
    """User × item: the exponent above. What a recommender that knew everything would rank by."""


def generate(*, users: int, items: int, seed: int = 0) -> Interactions:
    rng = np.random.default_rng(seed)
    tastes = rng.standard_normal((users, FACTORS))
    characters = rng.standard_normal((items, FACTORS))
    popularity = rng.standard_normal(items)
    affinity = SHARPNESS * tastes @ characters.T / np.sqrt(FACTORS) + popularity
    noisy = affinity + rng.gumbel(size=affinity.shape)
    taken = np.argsort(-noisy, axis=1, kind="stable")[:, :TAKEN]
    taken = rng.permuted(taken, axis=1)
    kept = taken[:, HELD_OUT:]
    seen = np.zeros((users, items), dtype=bool)
    np.put_along_axis(seen, kept, True, axis=1)
    pairs = np.stack([np.repeat(np.arange(users), kept.shape[1]), kept.ravel()], axis=1)
    return Interactions(
        train=torch.from_numpy(pairs),
        held_out=torch.from_numpy(taken[:, :HELD_OUT].copy()),
        seen=torch.from_numpy(seen),
        affinity=torch.from_numpy(affinity),
    )


def recall_at_10(scores: Tensor, seen: Tensor, held_out: Tensor) -> Tensor:
    """Of each user's held-out items, the share among the ten best-scored ones that are new to the user."""
    best = scores.masked_fill(seen, -torch.inf).topk(10, dim=1).indices
    return (held_out.unsqueeze(2) == best.unsqueeze(1)).any(dim=2).double().mean(dim=1)

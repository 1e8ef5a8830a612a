"""Click logs from a known model, and how well scores rank them: what the recommenders of parameter servers are shown with.

Every impression has an id in each of several fields, log-uniform, as ids are in real logs: a few are frequent, most are rare.
The probability of a click is that of a factorisation machine whose weights are drawn once. Because probabilities are known,
a model is scored by its *expected* AUC: the AUC with every impression counted as a click with its true probability, which
has no noise of the labels in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

_RANK = 4


class ClickLog(Dataset[Any]):
    """Impressions. A batch is made at once, by `__getitems__`; give loaders `collate_fn=as_is`."""

    def __init__(self, ids: Tensor, clicks: Tensor, probabilities: Tensor) -> None:
        self.ids, self.clicks, self.probabilities = ids, clicks, probabilities

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], self.clicks[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.ids[chosen], self.clicks[chosen]


def as_is(batch: Any) -> Any:
    """`collate_fn` for batches that are made at once."""
    return batch


@dataclass(frozen=True)
class ClickLogs:
    train: ClickLog
    test: ClickLog
    best: float
    """The expected AUC of the true probabilities."""


def generate(*, samples: int, fields: int, ids: int, test: int = 20_000, seed: int = 0) -> ClickLogs:
    """`ids`: how many each field has. Ids of different fields differ."""
    random = np.random.default_rng(seed)
    weights = random.normal(0, 0.5, (fields, ids)).astype(np.float32)
    vectors = random.normal(0, 0.35, (fields, ids, _RANK)).astype(np.float32)
    total = samples + test
    chosen = np.exp(random.uniform(0, np.log(ids), (total, fields))).astype(np.int64) % ids
    every = np.arange(fields)
    logits = weights[every, chosen].sum(1) - 1.0
    summed, squares = np.zeros((total, _RANK), np.float32), np.zeros((total, _RANK), np.float32)
    for one in every:
        found = vectors[one, chosen[:, one]]
        summed += found
        squares += found * found
    logits += 0.5 * (summed * summed - squares).sum(1)
    probabilities = 1 / (1 + np.exp(-logits))
    clicks = (random.random(total) < probabilities).astype(np.float32)
    keys = torch.from_numpy(chosen + (every << 40))
    parts = [torch.from_numpy(each) for each in (clicks, probabilities.astype(np.float32))]
    return ClickLogs(
        ClickLog(keys[:samples], parts[0][:samples], parts[1][:samples]),
        ClickLog(keys[samples:], parts[0][samples:], parts[1][samples:]),
        expected_auc(parts[1][samples:], parts[1][samples:]),
    )


def expected_auc(scores: Tensor, probabilities: Tensor) -> float:
    """The expectation of the AUC of `scores` over labels drawn with these probabilities; ties count half."""
    order = torch.argsort(scores.double())
    sorted_scores, positive = scores.double()[order], probabilities.double()[order]
    negative = 1 - positive
    _, group = torch.unique_consecutive(sorted_scores, return_inverse=True)
    negative_of = torch.zeros(int(group[-1]) + 1, dtype=torch.float64).index_add_(0, group, negative)
    below = torch.cumsum(negative_of, 0) - negative_of
    won = (positive * (below[group] + negative_of[group] / 2)).sum()
    # An impression is not compared with itself.
    own = (positive * negative).sum()
    return float((won - own / 2) / (positive.sum() * negative.sum() - own))

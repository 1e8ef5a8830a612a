"""Divides an iterable dataset among virtual workers.

Virtual worker r gets samples r, r + N, r + 2N … of the dataset; with data workers, of what it yields in each of them. A dataset
that can read only the samples of a rank is made per rank: `job.dataloader(lambda rank: …)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from gyrostat.data.dataset_replica import has_state_dict


class EveryNth(IterableDataset[Any]):
    """Every `of`-th sample of a dataset, beginning with number `rank`."""

    def __init__(self, dataset: Any, rank: int, of: int) -> None:
        self.dataset, self.rank, self.of = dataset, rank, of
        self.in_the_middle = False

    def __iter__(self) -> Iterator[Any]:
        skip = self.of - 1 if self.in_the_middle else self.rank
        self.in_the_middle = False
        for sample in self.dataset:
            if skip:
                skip -= 1
                continue
            self.in_the_middle = True
            yield sample
            skip = self.of - 1
        self.in_the_middle = False


class StatefulEveryNth(EveryNth):
    """The same for a dataset that can save its position."""

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "in_the_middle": self.in_the_middle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self.in_the_middle = state["in_the_middle"]


def every_nth(dataset: Any, rank: int, of: int) -> EveryNth:
    """The samples of virtual worker `rank` of `of`."""
    return (StatefulEveryNth if has_state_dict(dataset) else EveryNth)(dataset, rank, of)

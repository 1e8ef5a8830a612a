"""The configurations of a job that `verify` runs. Pure.

Every placement from start to end, one saved in the middle and resumed on another placement, and plain DDP with one process per
virtual worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import Placement
from gyrostat.core.plural import plural


class Against(StrEnum):
    """What the placements are compared with, in addition to each other."""

    DDP = "ddp"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to run the job."""

    placement: Placement
    reference: bool = False
    """As plain DDP, one process per virtual worker."""
    cut: int | None = None
    """Saved and stopped after this many steps, then resumed …"""
    resumed_on: Placement | None = None
    """… on this placement."""

    @property
    def name(self) -> str:
        if self.reference:
            processes = self.placement.virtual_workers
            return f"plain DDP, {plural(processes, 'process', 'processes')}"
        if self.resumed_on is None:
            return describe(self.placement)
        return (
            f"{describe(self.placement)}, saved after step {self.cut}, resumed on {describe(self.resumed_on)}"
        )


def counts(placement: Placement) -> list[int]:
    """The number of virtual workers of each worker."""
    return [len(placement.held_by(worker)) for worker in range(placement.workers)]


def describe(placement: Placement) -> str:
    """`4 workers`; with their numbers of virtual workers if these differ: `2 workers (3+1)`."""
    each = counts(placement)
    name = plural(len(each), "worker")
    return name if len(set(each)) == 1 else f"{name} ({'+'.join(map(str, each))})"


def default_placements(virtual_workers: int) -> tuple[Placement, ...]:
    """One worker per virtual worker, two workers as uneven as possible, and one worker."""
    if virtual_workers < 1:
        raise UsageError(f"--virtual-workers must be at least 1, got {virtual_workers}")
    wanted = [[1] * virtual_workers, [virtual_workers - 1, 1], [virtual_workers]]
    return _distinct([Placement.from_counts(each) for each in wanted if min(each) > 0])


def parse_placements(text: str, virtual_workers: int) -> tuple[Placement, ...]:
    """`1,2,3+1`: a number of workers that share evenly, or the numbers of virtual workers of each."""
    placements = []
    for part in text.split(","):
        try:
            numbers = [int(number) for number in part.split("+")]
        except ValueError:
            raise UsageError(
                f"--workers takes numbers of workers, or how many virtual workers each one runs, such as 1,2,3+1; "
                f"got {part!r}"
            ) from None
        if len(numbers) == 1:
            placements.append(Placement.even(virtual_workers, numbers[0]))
        elif sum(numbers) != virtual_workers:
            raise UsageError(
                f"--workers {part} places {sum(numbers)} virtual workers, but --virtual-workers says {virtual_workers}"
            )
        else:
            placements.append(Placement.from_counts(numbers))
    return _distinct(placements)


def interrupted(placements: Sequence[Placement], cut: int) -> Configuration:
    """Saved on the last placement but one, resumed on the last."""
    return Configuration(
        placement=placements[max(0, len(placements) - 2)], cut=cut, resumed_on=placements[-1]
    )


def choose_cut(epochs: Sequence[int]) -> int | None:
    """The number of steps after which to save: near the middle, and within an epoch, which tests more than between two epochs.
    `epochs` is the epoch of every step. None if there are too few steps.
    """

    def unsuitable(cut: int) -> tuple[bool, int, int]:
        return epochs[cut - 1] != epochs[cut], abs(2 * cut - len(epochs)), cut

    return min(range(1, len(epochs)), key=unsuitable, default=None)


def _distinct(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(dict.fromkeys(placements))

"""Whether free cells suffice for all requests that tenants may still make, level by level (HiveD, Theorem 1). Pure.

With f_k free cells at level k and n_k = r_k - a_k cells that tenants may still request, splitting larger cells that no
tenant needs gives F_k = max(0, gap_{k+1}) * h_{k+1} more, and gap_k = f_k + F_k - n_k. While no gap is negative, every legal
request succeeds. A negative gap is a shortfall; it does not reduce the levels below, because fragments are of no use there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Shortfall:
    """The number of a virtual cluster's cells that do not fit on healthy devices now."""

    vc: str
    cell_type: str
    level: int
    """As in the paper: 1 is a device."""
    short: int

    def __str__(self) -> str:
        return f"{self.vc} is {self.short} short of its {self.cell_type} cells (level {self.level})"


def gaps(free: Sequence[int], needed: Sequence[int], splits: Sequence[int]) -> list[int]:
    """For each level, the surplus of cells, or if negative the shortfall, after larger cells are served."""
    result = [0] * len(free)
    spare = 0
    for level in range(len(free) - 1, -1, -1):
        gap = free[level] + spare - needed[level]
        result[level] = gap
        spare = gap * splits[level] if gap > 0 else 0
    return result


def missing_by_tenant(missing: int, needs: Mapping[str, int]) -> dict[str, int]:
    """Divide the `missing` cells among tenants: one by one to the tenant with the most needs; ties go to the first name."""
    left = dict(needs)
    lacking: dict[str, int] = {}
    for _ in range(missing):
        name = min(left, key=lambda name: (-left[name], name))
        left[name] -= 1
        lacking[name] = lacking.get(name, 0) + 1
    return lacking

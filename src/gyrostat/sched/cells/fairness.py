"""Shares of opportunistic devices: weighted max-min fairness in whole devices (HiveD §3.3). Pure.

No tenant gets more than it demands; the rest goes to the others by weight; and no tenant could get more without taking from
one with a smaller share per weight.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from fractions import Fraction


def fair_shares(
    capacity: int, demands: Mapping[str, int], weights: Mapping[str, int | float]
) -> dict[str, int]:
    """Devices of `capacity` for each tenant with a demand. Ties go to the first name."""
    shares = dict.fromkeys(demands, 0)
    unsatisfied = sorted(name for name, demand in demands.items() if demand > 0)
    exact = {name: Fraction(weights.get(name, 1)) for name in unsatisfied}
    # First the tenants whose whole demand is below their share, then rounded shares, then device by device.
    while unsatisfied:
        level = Fraction(capacity, 1) / sum(exact[name] for name in unsatisfied)
        satisfied = [name for name in unsatisfied if demands[name] <= level * exact[name]]
        if not satisfied:
            break
        for name in satisfied:
            shares[name] = demands[name]
            capacity -= demands[name]
        unsatisfied = [name for name in unsatisfied if name not in satisfied]
    if unsatisfied:
        level = Fraction(capacity, 1) / sum(exact[name] for name in unsatisfied)
        for name in unsatisfied:
            shares[name] = int(level * exact[name])
            capacity -= shares[name]
    queue = [(Fraction(shares[name] + 1) / exact[name], name) for name in unsatisfied]
    heapq.heapify(queue)
    while capacity > 0 and queue:
        _, name = heapq.heappop(queue)
        shares[name] += 1
        capacity -= 1
        if shares[name] < demands[name]:
            heapq.heappush(queue, (Fraction(shares[name] + 1) / exact[name], name))
    return shares

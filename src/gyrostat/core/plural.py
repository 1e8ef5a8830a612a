"""Numbers with their nouns in messages: `1 worker`, `2 workers`."""

from __future__ import annotations

from collections.abc import Sequence


def plural(number: int, noun: str, many: str = "") -> str:
    """`many` is the plural if it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def plural_range(low: int, high: int, noun: str) -> str:
    """`1 worker` if both ends are equal, otherwise `1 to 4 workers`."""
    return plural(high, noun) if low == high else f"{low:,} to {plural(high, noun)}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """`worker 2`, `workers 0, 2`."""
    return f"{noun}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"

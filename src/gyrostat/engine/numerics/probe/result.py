"""The results of a probe on one machine, and their comparison with those of another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The digests of one machine's operators, and the settings they were computed with."""

    format: int = FORMAT
    torch: str
    cpu: str
    type: str | None
    """The CPU's type, as libraries found it before settings were pinned."""
    capability: str
    """The instruction set that ATen used."""
    threads: int
    pool: tuple[str, ...] | None
    operators: Mapping[str, str]
    """By `family/operator`: a digest of its results and gradients."""

    @property
    def families(self) -> dict[str, str]:
        """A digest per family."""
        names = dict.fromkeys(name.partition("/")[0] for name in self.operators)
        return {
            family: digest_of(
                value for name, value in self.operators.items() if name.startswith(f"{family}/")
            )
            for family in names
        }

    @property
    def all(self) -> str:
        return digest_of(self.operators.values())


@dataclass(frozen=True, kw_only=True)
class ProbeComparison:
    """Two results, side by side."""

    differing: tuple[str, ...]
    """Operators that both ran, with different bits."""
    only_one: tuple[str, ...]
    """Operators that only one of them ran."""
    settings: tuple[str, ...]
    """Settings that differ, and may explain differing operators."""

    @property
    def agree(self) -> bool:
        return not self.differing and not self.only_one


def compare(here: ProbeResult, there: ProbeResult) -> ProbeComparison:
    """How two results differ."""
    both = [name for name in here.operators if name in there.operators]
    settings = {
        "torch": (here.torch, there.torch),
        "threads": (here.threads, there.threads),
        "pool": (here.pool, there.pool),
    }
    return ProbeComparison(
        differing=tuple(name for name in both if here.operators[name] != there.operators[name]),
        only_one=tuple(sorted(here.operators.keys() ^ there.operators.keys())),
        settings=tuple(
            f"{name} is {_shown(mine)} here and {_shown(theirs)} there"
            for name, (mine, theirs) in settings.items()
            if mine != theirs
        ),
    )


def digest_of(digests: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return "not given" if value is None else str(value)

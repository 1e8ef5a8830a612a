"""The modules and classes of the package, parsed, for tests about its structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src/gyrostat"


class Module(NamedTuple):
    name: str
    """Without the leading `gyrostat.`."""
    lines: int
    tree: ast.Module


class Definition(NamedTuple):
    module: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module}.{self.node.name}"


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, len(text.splitlines()), ast.parse(text)))
    return tuple(found)


def classes() -> Iterator[Definition]:
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                yield Definition(module.name, node)

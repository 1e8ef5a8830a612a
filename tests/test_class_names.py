"""A public class name means one thing in the whole package. Private names are exempt: they stay within their module."""

from __future__ import annotations

from collections import defaultdict

from tests.source_tree import classes

SHARED: dict[str, str] = {}
"""Names of several classes, with the reason."""


def test_public_class_names_are_unique() -> None:
    modules = defaultdict(list)
    for found in classes():
        if not found.node.name.startswith("_"):
            modules[found.node.name].append(found.module)
    several = {name: where for name, where in modules.items() if len(where) > 1}
    assert {name: where for name, where in several.items() if name not in SHARED} == {}
    assert SHARED.keys() <= several.keys(), "these names are unique: remove them from the list"

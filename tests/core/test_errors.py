"""The tree of errors in the docstring of `core.errors` is the one in the code."""

import ast
import re

from gyrostat.core import errors
from tests.source_tree import classes


def test_the_tree_names_every_error() -> None:
    bases = {
        definition.node.name: [base.id for base in definition.node.bases if isinstance(base, ast.Name)]
        for definition in classes()
    }
    found = {"GyrostatError"}
    while more := {name for name, parents in bases.items() if found & set(parents)} - found:
        found |= more
    drawn = re.findall(r"^(?:│   )*(?:[├└]── )?([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    assert set(drawn) - {"The"} == found
